"""The rewrite of a tiny table has the rows of a MERGE, and has conditions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge.kinds import current_image
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.spark.tuning import TINY_CHANGES
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import (
    assert_overtaken,
    log_of,
    merge,
    merge_beside_column_of_owner,
    merge_with_change_data,
    overtake,
)
from pgcdc_assets_tests.support.merge.random_history import COLUMNS, KEY, random_relation
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

pytestmark = pytest.mark.spark

_TARGET = CdcTable("shop", "items")
_ROWS = 100


@pytest.fixture(autouse=True)
def by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the tables to Spark."""
    merge_by_spark(monkeypatch)


@pytest.fixture
def landing(zone: RawZone) -> Landing:
    """Land a snapshot of a hundred rows, and a window without changes of the table."""
    landing = Landing(zone, [random_relation("d")])
    landing.begin([[str(n), "1", "a", "1.00", "x"] for n in range(_ROWS)])
    landing.land([update("0", "1", "a", "1.00", "x")])
    return landing


def _rows(spark: SparkSession, path: str) -> list[tuple[int, int, str]]:
    frame = spark.read.format("delta").load(path)
    return sorted((r.history, r.id, r.doc) for r in frame.collect())


def _land_changes(landing: Landing) -> LsnWindow:
    return landing.land(
        [update("1", "1", "b", "1.00", "x"), delete("2", "1", None, None, None)],
        [delete("500", "1", None, None, None), insert("600", "1", "c", "1.00", "x")],
        [delete("3", "1", None, None, None), insert("3", "1", "d", "1.00", "x")],
    )


_CHANGED = sorted(
    [(n, 1, "a") for n in range(_ROWS) if n not in (1, 2, 3)]
    + [(1, 1, "b"), (3, 1, "d"), (600, 1, "c")]
)


@pytest.mark.sampled
def test_a_rewrite_has_the_rows_and_counts_of_a_merge(
    spark: SparkSession, landing: Landing
) -> None:
    """A delete of a missing row is not counted. A delete and insert of one key is an update."""
    path = merge(spark, landing, _TARGET).path
    before = spark.read.format("delta").load(path).where("history > 3").collect()
    _land_changes(landing)
    report = merge(spark, landing, _TARGET)
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (1, 2, 1)
    assert report.row_count == _ROWS
    assert log_of(report.path)[0]["operation"] == "WRITE"
    assert _rows(spark, report.path) == _CHANGED
    after = spark.read.format("delta").load(path).where("history > 3 AND history < 600").collect()
    assert sorted(after) == sorted(before)
    assert merge(spark, landing, _TARGET).changes_read == 0


@pytest.mark.sampled
def test_a_column_that_the_owner_added_keeps_its_values(
    spark: SparkSession, landing: Landing
) -> None:
    path = merge_beside_column_of_owner(spark, landing, _TARGET, _land_changes)
    assert log_of(path)[0]["operation"] == "MERGE"
    assert spark.read.format("delta").load(path).where("extra = 'mine'").count() == _ROWS - 1
    assert _rows(spark, path) == _CHANGED


@pytest.mark.sampled
def test_a_column_added_by_the_changes_is_null_in_unchanged_rows(
    spark: SparkSession, zone: RawZone
) -> None:
    wider = relation(*COLUMNS, column("more", "text"), key=KEY)
    landing = Landing(zone, [random_relation("d"), wider])
    landing.begin([[str(n), "1", "a", "1.00", "x"] for n in range(_ROWS)])
    landing.land([update("0", "1", "b", "1.00", "x", "y", version=2)])
    report = merge(spark, landing, _TARGET)
    assert log_of(report.path)[0]["operation"] == "WRITE"
    found = spark.read.format("delta").load(report.path).groupBy("more").count().collect()
    assert sorted(map(tuple, found), key=repr) == [("y", 1), (None, _ROWS - 1)]


@pytest.mark.sampled
def test_change_data_has_no_unchanged_row(spark: SparkSession, landing: Landing) -> None:
    # Two updates with old and new rows, a delete and an insert.
    assert merge_with_change_data(spark, landing, _TARGET, _land_changes) == 6


@pytest.mark.sampled
def test_a_key_of_the_settings_that_the_identity_contains_is_equivalent(
    spark: SparkSession, landing: Landing
) -> None:
    """`pgcdc init` writes the key of each table."""
    named = replace(_TARGET, key=KEY)
    path = merge(spark, landing, named).path
    _land_changes(landing)
    merge(spark, landing, named)
    assert log_of(path)[0]["operation"] == "WRITE"
    assert _rows(spark, path) == _CHANGED


@pytest.mark.sampled
def test_a_row_deleted_by_a_deletion_vector_stays_deleted(
    spark: SparkSession, landing: Landing
) -> None:
    path = merge(spark, landing, _TARGET).path
    spark.sql(f"DELETE FROM {delta_table(path)} WHERE history = 50")
    _land_changes(landing)
    merge(spark, landing, _TARGET)
    assert log_of(path)[0]["operation"] == "WRITE"
    assert _rows(spark, path) == [row for row in _CHANGED if row[0] != 50]


@pytest.mark.sampled
def test_a_duplicate_key_is_kept_until_it_changes(spark: SparkSession, landing: Landing) -> None:
    path = merge(spark, landing, _TARGET).path
    twice = spark.read.format("delta").load(path).where("history IN (1, 50)")
    twice.write.format("delta").mode("append").save(path)
    _land_changes(landing)
    merge(spark, landing, _TARGET)
    assert log_of(path)[0]["operation"] == "WRITE"
    assert _rows(spark, path) == sorted([*_CHANGED, (50, 1, "a")])


@pytest.mark.sampled
def test_rows_with_a_null_key_are_kept(spark: SparkSession, zone: RawZone) -> None:
    """A key of the settings may be NULL; rows with a NULL key are not distinguished."""
    landing = Landing(zone, [random_relation("f")])
    rows = [[str(n), "1", "a", "1.00", "x"] for n in range(_ROWS)]
    landing.begin([*rows, *[["50", None, "a", "1.00", "x"]] * 2])
    old = ("50", "1", "a", "1.00", "x")
    landing.land([update("50", "1", "b", "1.00", "x", old=old, old_kind="O")])
    report = merge(spark, landing, replace(_TARGET, key=KEY))
    assert log_of(report.path)[0]["operation"] == "MERGE"
    assert spark.read.format("delta").load(report.path).where("id IS NULL").count() == 2


@pytest.mark.sampled
def test_many_changes_and_unknown_values_use_a_merge(spark: SparkSession, landing: Landing) -> None:
    path = merge(spark, landing, _TARGET).path
    landing.land([update("1", "1", None, "2.00", "x", unchanged=(2,))])
    merge(spark, landing, _TARGET)
    assert log_of(path)[0]["operation"] == "MERGE"
    landing.land([update("1", "1", "b", "1.00", str(n)) for n in range(TINY_CHANGES + 1)])
    merge(spark, landing, _TARGET)
    assert log_of(path)[0]["operation"] == "MERGE"


@pytest.mark.sampled
def test_an_overtaken_merge_writes_nothing(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(spark, landing, _TARGET)
    first = _land_changes(landing)
    landing.land([update("1", "1", "z", "1.00", "x")])
    overtake(
        monkeypatch,
        current_image,
        "read_files",
        lambda: merge(spark, landing, _TARGET, through=first),
    )
    assert_overtaken(spark, landing, _TARGET)
    report = merge(spark, landing, _TARGET)
    assert (1, 1, "z") in _rows(spark, report.path)
    assert report.row_count == _ROWS
