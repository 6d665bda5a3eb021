"""Unchanged TOAST values in rows that change their keys often."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import (
    Change,
    Landing,
    Versions,
    column,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

pytestmark = pytest.mark.spark

MOVES = 40
KEYS = 7


def _moves() -> list[Change]:
    """Return changes of two rows that exchange keys. The second row sends its value once."""
    changes = []
    for number in range(MOVES):
        for row, at in ((1, number + 3), (2, number)):
            old, new = str(at % KEYS), str((at + 1) % KEYS)
            is_said = row == 2 and number == MOVES // 2
            changes.append(
                update(
                    new,
                    "said midway" if is_said else None,
                    str(number),
                    old=(old, None, None),
                    unchanged=() if is_said else (1,),
                )
            )
    return changes


@pytest.mark.sampled
def test_forty_key_changes_of_a_row_need_few_jobs(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fold of Spark follows the key changes by pointer doubling, not one after the other."""
    merge_by_spark(monkeypatch)
    landing = Landing(
        zone, [relation(column("id"), column("doc", "text"), column("n"), key=("id",))]
    )
    copied = [["3", "first", "-1"], ["0", "second", "-1"]]
    landing.begin(copied)
    expected = Versions(key=(0,))
    expected.copy(copied, landing.lsn)
    transactions = [[change] for change in _moves()]
    for number, changes in enumerate(transactions):
        expected.apply(changes, landing.lsn + 0x10 * number)
    landing.land(*transactions)

    frame, computed = type(spark.range(1)), []
    checkpoint = frame.localCheckpoint

    def counted(*arguments: Any, **more: Any) -> Any:
        computed.append(arguments)
        return checkpoint(*arguments, **more)

    monkeypatch.setattr(frame, "localCheckpoint", counted)
    report = merge(spark, landing, CdcTable("shop", "items", (2,)))
    assert 1 < len(computed) <= MOVES.bit_length() + 1
    rows = [tuple(row) for row in spark.read.format("delta").load(report.path).collect()]
    wanted = [(int(v.row[0] or 0), v.row[1], int(v.row[2] or 0)) for v in expected.all]
    assert sorted(row[:3] for row in rows) == sorted(wanted)
    assert {row[1] for row in wanted} == {"first", "second", "said midway"}
