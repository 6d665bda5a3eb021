"""Rebuilds and snapshots that end later, or are above the LSN of the rebuild."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.errors import SchemaChangeError, TransientError
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge

pytestmark = pytest.mark.spark

_BEFORE = relation(column("id"), column("v", "text"))
_AFTER = relation(column("id"), column("v", "int4"))


@pytest.mark.sampled
def test_a_change_that_only_a_later_snapshot_has_is_refused(
    spark: SparkSession, zone: RawZone
) -> None:
    """The rows that `USING length(v)` has changed are in no change of the stream."""
    target = CdcTable("shop", "items")
    landing = Landing(zone, [_BEFORE, _AFTER])
    landing.begin([["1", "a"], ["2", "ab"]])
    through = landing.land([update("1", "1", version=2)]).end
    landing.land([])
    landing.copy([["1", "1"], ["2", "2"]], version=2)
    landing.land([insert("3", "3", version=2)])
    path = merge(spark, landing, target).path
    with pytest.raises(SchemaChangeError, match="its type changed from text to int4"):
        rebuild_table(spark, zone, target, 1, through)
    rows = spark.read.format("delta").load(path).select("id", "v").collect()
    assert sorted(map(tuple, rows)) == [(1, 1), (2, 2), (3, 3)]
    assert rebuild_table(spark, zone, target, 1).row_count == 3


_RIGHT = [["1", "right"], ["2", "c"], ["3", "d"]]


def _begin_with_a_wrong_row(
    spark: SparkSession, zone: RawZone
) -> tuple[Landing, CdcTable, str, int]:
    """Merge a snapshot with a wrong row, land two more transactions, and return an LSN between.

    A snapshot of `_RIGHT` at this LSN has the first of the two.
    """
    target = CdcTable("shop", "items")
    landing = Landing(zone, [_BEFORE])
    landing.begin([["1", "wrong"], ["2", "b"]])
    landing.land([update("2", "c")])
    path = merge(spark, landing, target).path
    at = landing.lsn + 0x10
    landing.land([insert("3", "d")], [insert("4", "e")])
    return landing, target, path, at


@pytest.mark.sampled
@pytest.mark.parametrize("is_partial", [False, True], ids=["of all rows", "of some rows"])
def test_a_snapshot_that_is_completed_during_a_rebuild_is_not_passed(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, is_partial: bool
) -> None:
    """Merges apply no snapshot below the watermark, and `pgcdc resnapshot` would report success."""
    landing, target, path, at = _begin_with_a_wrong_row(spark, zone)
    real, copies = build_tasks, [_RIGHT]

    def copied(*args: Any, **more: Any) -> Any:
        tasks = list(real(*args, **more))
        if copies:
            landing.copy(copies.pop(), at=at, is_partial=is_partial)
        return tasks

    monkeypatch.setattr("pgcdc_assets.merge.run.build_tasks", copied)
    with pytest.raises(TransientError, match=r"completed during its rebuild.* Run the rebuild"):
        rebuild_table(spark, zone, target, 1)
    merge(spark, landing, target)
    rows = spark.read.format("delta").load(path).select("id", "v").collect()
    assert sorted(map(tuple, rows)) == [(1, "right"), (2, "c"), (3, "d"), (4, "e")]


@pytest.mark.sampled
@pytest.mark.parametrize("point", [failpoints.AFTER_REBUILD_STAGED, failpoints.AFTER_REBUILD_MOVED])
def test_a_snapshot_that_is_completed_right_before_the_commit_of_a_rebuild_is_not_passed(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Its run has looked at the table before the commit. The files of a large table move slowly."""
    landing, target, path, at = _begin_with_a_wrong_row(spark, zone)
    copies = [_RIGHT]

    def reach(name: str) -> None:
        if name == point and copies:
            landing.copy(copies.pop(), at=at)

    monkeypatch.setattr(failpoints, "reach", reach)
    with pytest.raises(TransientError, match=r"completed during its rebuild.* Run the rebuild"):
        rebuild_table(spark, zone, target, 1)
    rebuild_table(spark, zone, target, 1)
    landing.land([insert("5", "f")])
    merge(spark, landing, target)
    rows = spark.read.format("delta").load(path).select("id", "v").collect()
    assert sorted(map(tuple, rows)) == [(1, "right"), (2, "c"), (3, "d"), (4, "e"), (5, "f")]
