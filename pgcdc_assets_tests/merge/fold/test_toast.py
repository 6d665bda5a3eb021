"""Unchanged TOAST values in rows that change their keys often."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets.merge.fold.toast import UNKNOWN_VALUE
from pgcdc_assets.merge.fold.versions import find_affected_rows, typed_events
from pgcdc_assets.merge.kinds.current_image import fold_changes, rows_alone
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.columns import SCD1_COLUMNS
from pgcdc_assets_tests.support.merge.frames import (
    COLUMNS,
    KEY,
    OF_IMAGE,
    Frames,
    raw_row,
    stored_frame,
    typed_row,
)
from pgcdc_assets_tests.support.merge.history import (
    Change,
    Landing,
    Versions,
    column,
    insert,
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


def _left_out(row: str, key: str | None = None) -> Change:
    """Return an update that leaves `doc` out; `key` is another key of the row before."""
    old = None if key is None else ("1", key, None, None, None)
    return update("1", row, None, "1.00", None, old=old, unchanged=(2,))


_NEW = insert("1", "4", None, "1.00", None, unchanged=(2,))
_SAID = update("1", "4", "said", "1.00", None)
_IN_TABLE = ("1", "1", "stored", "1.00", "NaN")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("changes", "image", "history", "alone"),
    [
        ([_left_out("1")], [None], ["stored"], None),
        ([_left_out("3", "1")], ["stored"], ["stored"], None),
        # No row had the value.
        ([_left_out("2")], [None], None, None),
        ([_left_out("3", "2")], None, None, None),
        # The row has come through the row filter of the publication.
        ([_NEW], None, None, None),
        ([_NEW, _left_out("5", "4")], None, None, None),
        ([_NEW, _SAID], ["said"], None, ["said"]),
        ([_NEW, _SAID, _left_out("5", "4")], ["said"], None, ["said"]),
    ],
)
def test_a_value_that_neither_the_changes_nor_the_table_has_is_an_error(
    spark: SparkSession,
    changes: list[Change],
    image: list[str | None] | None,
    history: list[str | None] | None,
    alone: list[str | None] | None,
) -> None:
    """D5, D6: an image leaves to the MERGE what the row of the same key may have.

    Args:
        image: the documents, or None for an error.
        alone: those of an image without a table.
    """
    raw = [raw_row(change, 16, ordinal) for ordinal, change in enumerate(changes)]
    frames = Frames([relation(*COLUMNS, key=KEY)], Versions((0, 1)), rows=raw)
    fold = frames.fold(SCD1_COLUMNS, shows_the_past=False)
    table = {**typed_row(_IN_TABLE), "_lsn": 1, "_ordinal": 0, "_commit_ts": None}
    stored, found = stored_frame(spark, fold, [table], OF_IMAGE), frames.changes(spark)
    touched = find_affected_rows(found, stored, fold, is_large=False)
    for frame, wanted in (
        (fold_changes(found, fold, stored), image),
        (rows_alone(fold_changes(found, fold, None), fold), alone),
        (typed_events(touched.events, fold, touched.rows, touched.stored), history),
        (typed_events(touched.events, fold, None, None), None),
    ):
        if wanted is None:
            with pytest.raises(PySparkException, match=UNKNOWN_VALUE):
                frame.collect()
        else:
            rows = [row.asDict() for row in frame.collect()]
            documents = [row["value_2"] for row in rows if row.get("is_content", True)]
            assert sorted(documents, key=str) == sorted(wanted, key=str)
