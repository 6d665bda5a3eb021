"""What small tables may hold in memory: texts that compress well are left to Spark."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.merge.batch import commit, latest, run, typed_rows
from pgcdc_assets.merge.batch import input as batch_input
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_together, merges_by_spark

pytestmark = pytest.mark.spark

_BOUND = 20_000
# Some hundred bytes in a file.
_LARGE = "x" * 50_000
_TARGET = CdcTable("shop", "items")
_OTHER_ID = 4_711


@pytest.fixture(autouse=True)
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    merge_together(monkeypatch)


def _landing(zone: RawZone) -> Landing:
    items = relation(column("id"), column("v", "text"))
    return Landing(zone, [items, replace(items, relation_id=_OTHER_ID, table="notes")])


def _rows(spark: SparkSession, path: str) -> list[tuple[int, str]]:
    found = spark.read.format("delta").load(path).collect()
    return sorted((row["id"], row["v"]) for row in found)


@pytest.mark.sampled
def test_only_the_table_with_large_changes_is_left_to_spark(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_input, "MOST_BYTES", _BOUND)
    landing = _landing(zone)
    landing.begin([["1", "a"]])
    landing.land([update("1", "b"), replace(insert("7", _LARGE), relation_id=_OTHER_ID)])
    targets = [_TARGET, CdcTable("shop", "notes")]
    paths = {}
    for report in merge_tables(spark, zone, targets, landing.windows[-1]):
        assert isinstance(report, MergeReport), report
        paths[report.table] = report.path
    assert merges_by_spark(paths["items"]) == 0
    assert merges_by_spark(paths["notes"]) > 0
    assert _rows(spark, paths["items"]) == [(1, "b")]
    assert _rows(spark, paths["notes"]) == [(7, _LARGE)]


@pytest.mark.sampled
def test_a_large_snapshot_is_left_to_spark(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_input, "MOST_BYTES", _BOUND)
    landing = _landing(zone)
    landing.begin([["1", _LARGE]])
    landing.land([])
    path = merge(spark, landing, _TARGET).path
    assert merges_by_spark(path) > 0
    assert _rows(spark, path) == [(1, _LARGE)]


@pytest.mark.sampled
def test_a_table_with_large_rows_is_left_to_spark(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = _landing(zone)
    landing.begin([["1", _LARGE], ["2", "b"]])
    landing.land([])
    path = merge(spark, landing, _TARGET).path
    assert merges_by_spark(path) == 0
    monkeypatch.setattr(commit, "MOST_ROW_BYTES", _BOUND)
    landing.land([update("2", "c")])
    merge(spark, landing, _TARGET)
    assert merges_by_spark(path) == 1
    assert _rows(spark, path) == [(1, _LARGE), (2, "c")]


def test_a_window_with_whole_pages_of_wal_is_not_left_to_spark(
    spark: SparkSession, zone: RawZone
) -> None:
    """After a checkpoint of the server the WAL has each changed page as a whole."""
    landing = _landing(zone)
    landing.begin([["1", "a"]])
    landing.land([])
    path = merge(spark, landing, _TARGET).path
    before = merges_by_spark(path)
    landing.land([update("1", "b")], wal_bytes=40 * 1024 * 1024)
    merge(spark, landing, _TARGET)
    assert merges_by_spark(path) == before
    assert _rows(spark, path) == [(1, "b")]


@pytest.mark.sampled
@pytest.mark.parametrize("is_stored", [True, False], ids=["of the table", "of a change"])
def test_a_history_with_many_copies_of_a_large_value_is_left_to_spark(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    """A version has the whole value, also if its change leaves the value out."""
    for module in (latest, typed_rows, run):
        monkeypatch.setattr(module, "MOST_FILLED_BYTES", 3 * len(_LARGE))
    items = relation(column("id"), column("v", "text"), column("n"))
    landing = Landing(zone, [items])
    target = CdcTable("shop", "items", scd=(2,))
    landing.begin([["1", _LARGE, "0"]] if is_stored else [])
    landing.land([])
    path = merge(spark, landing, target).path

    def change(first: int, count: int) -> None:
        rows = [update("1", None, str(n), unchanged=(1,)) for n in range(first, first + count)]
        if not is_stored:
            rows.insert(0, insert("1", _LARGE, "0"))
            rows.append(delete("1", None, None))
        landing.land(rows)
        merge(spark, landing, target)

    change(1, 2)
    assert merges_by_spark(path) == 0
    change(3, 4)
    assert merges_by_spark(path) > 0
    found = spark.read.format("delta").load(path).collect()
    assert {row["v"] for row in found} == {_LARGE}
    assert len(found) == (7 if is_stored else 8)
