"""The rewrite of a range of a history keeps the rows outside, and has conditions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import run
from pgcdc_assets.merge.kinds import accumulating
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
from pgcdc_assets_tests.support.merge.one_table import (
    assert_overtaken,
    log_of,
    merge,
    merge_beside_column_of_owner,
    merge_with_change_data,
    overtake,
)
from pgcdc_assets_tests.support.merge.random_history import (
    COLUMNS,
    KEY,
    bound_merges,
    random_relation,
)

pytestmark = pytest.mark.spark

_TARGET = CdcTable("shop", "items", scd=(2,))
_ROWS = 5_000
_FIRST = 4_000


@pytest.fixture
def landing(zone: RawZone, monkeypatch: pytest.MonkeyPatch) -> Landing:
    """Land a snapshot of 5,000 rows. Tables of any size count as large."""
    bound_merges(monkeypatch)
    landing = Landing(zone, [random_relation("d")])
    landing.begin([[str(n), "1", "a", "1.00", "x"] for n in range(_ROWS)])
    # An update that changes nothing.
    landing.land([update("0", "1", "a", "1.00", "x")])
    return landing


@pytest.mark.sampled
def test_rows_outside_the_range_keep_their_files(spark: SparkSession, landing: Landing) -> None:
    """The rows in the range have the expected versions and the counts of a MERGE."""
    merge(spark, landing, _TARGET)
    _land_changes(landing)
    report = merge(spark, landing, _TARGET)
    assert report.watermark_after == landing.windows[-1].end
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (301, 300, 0)
    assert report.row_count == _ROWS + 301
    last = log_of(report.path)[0]
    assert last["operation"] == "WRITE"
    # The rows of the widened range of 300 keys.
    assert int(last["operationMetrics"]["numDeletedRows"]) < 500
    rows = spark.read.format("delta").load(report.path)
    found = [
        (r.history, r.doc, r._is_current, r._valid_to_lsn is None)
        for r in rows.where(f"history < {_FIRST + 2} AND history >= {_FIRST - 2}")
        .orderBy("history", "_valid_from_lsn")
        .collect()
    ]
    assert found == [
        (_FIRST - 2, "a", True, True),
        (_FIRST - 1, "a", True, True),
        (_FIRST, "a", False, False),
        (_FIRST + 1, "a", False, False),
        (_FIRST + 1, "b", True, True),
    ]
    assert rows.where("_is_current").count() == _ROWS
    assert merge(spark, landing, _TARGET).changes_read == 0


@pytest.mark.sampled
def test_a_column_that_the_owner_added_keeps_its_values(
    spark: SparkSession, landing: Landing
) -> None:
    path = merge_beside_column_of_owner(spark, landing, _TARGET, _land_changes)
    assert log_of(path)[0]["operation"] == "MERGE"
    assert spark.read.format("delta").load(path).where("extra = 'mine'").count() == _ROWS


@pytest.mark.sampled
def test_change_data_has_no_unchanged_row(spark: SparkSession, landing: Landing) -> None:
    # 300 versions ended, with old and new rows, and 301 versions are new.
    assert merge_with_change_data(spark, landing, _TARGET, _land_changes) == 901


@pytest.mark.sampled
def test_rows_with_a_null_key_are_kept(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of the settings may be NULL; rows with a NULL key are not distinguished."""
    bound_merges(monkeypatch)
    landing = Landing(zone, [random_relation("f")])
    rows = [[str(n), "1", "a", "1.00", "x"] for n in range(100)]
    landing.begin([*rows, *[["50", None, "a", "1.00", "x"]] * 2])
    one, other = ("50", "1", "a", "1.00", "x"), ("50", "1", "b", "1.00", "x")
    there = update(*other, old=one, old_kind="O")
    back = update(*one, old=other, old_kind="O")
    landing.land(*[[there, back]] * 50)
    report = merge(spark, landing, replace(_TARGET, key=("history", "id")))
    assert log_of(report.path)[0]["operation"] == "MERGE"
    kept = spark.read.format("delta").load(report.path).where("id IS NULL AND _is_current")
    assert kept.count() == 2


@pytest.mark.sampled
def test_unevenly_distributed_keys_are_counted(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics of the file estimate few rows in the range, but it has all rows except one."""
    bound_merges(monkeypatch)
    landing = Landing(zone, [random_relation("d")])
    far = str(2**31 - 1)
    landing.begin([[str(n), "1", "a", "1.00", "x"] for n in [*range(_ROWS), far]])
    landing.land([update(key, "1", "b", "1.00", "x") for key in ("0", str(_ROWS - 1))])
    assert log_of(merge(spark, landing, _TARGET).path)[0]["operation"] == "MERGE"


@pytest.mark.sampled
def test_a_column_added_by_the_changes_is_null_in_unchanged_rows(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_merges(monkeypatch)
    wider = relation(*COLUMNS, column("more", "text"), key=KEY)
    landing = Landing(zone, [random_relation("d"), wider])
    landing.begin([[str(n), "1", "a", "1.00", "x"] for n in range(100)])
    landing.land(
        [update(str(n), "1", "b", "1.00", "x") for n in range(0, 100, 2)],
        [update(str(n), "1", "c", "1.00", "x", "y", version=2) for n in range(0, 100, 4)],
    )
    report = merge(spark, landing, _TARGET)
    assert log_of(report.path)[0]["operation"] == "WRITE"
    rows = spark.read.format("delta").load(report.path)
    found = rows.groupBy("doc", "more", "_is_current").count().collect()
    assert sorted(map(tuple, found), key=repr) == [
        ("a", None, False, 50),
        ("a", None, True, 50),
        ("b", None, False, 25),
        ("b", None, True, 25),
        ("c", "y", True, 25),
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "per_change",
    [
        pytest.param(-1, id="merged", marks=pytest.mark.soak),
        pytest.param(1_000_000, id="rewritten"),
    ],
)
def test_an_overtaken_merge_writes_nothing(
    spark: SparkSession,
    landing: Landing,
    monkeypatch: pytest.MonkeyPatch,
    per_change: int,
) -> None:
    """The versions of the overtaken merge are derived from rows that are no longer current."""
    monkeypatch.setattr("pgcdc_assets.merge.kinds.history.REPLACED_PER_CHANGE", per_change)
    merge(spark, landing, _TARGET)
    first = _land_changes(landing)
    landing.land([update(str(_FIRST + 1), "1", "c", "1.00", "x")])
    overtake(
        monkeypatch,
        accumulating,
        "find_affected_rows",
        lambda: merge(spark, landing, _TARGET, first),
    )
    assert_overtaken(spark, landing, _TARGET)
    report = merge(spark, landing, _TARGET)
    versions = (
        spark.read.format("delta")
        .load(report.path)
        .where(f"history = {_FIRST + 1}")
        .orderBy("_valid_from_lsn")
        .collect()
    )
    assert [(r.doc, r._is_current) for r in versions] == [("a", False), ("b", False), ("c", True)]


@pytest.mark.sampled
def test_a_merge_that_is_overtaken_at_its_commit_ends(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta skips a duplicate transaction, and the count of rows never arrives."""
    merge(spark, landing, _TARGET)
    _land_changes(landing)
    overtake(monkeypatch, run, "check_not_overtaken", lambda: merge(spark, landing, _TARGET))
    assert_overtaken(spark, landing, _TARGET)
    assert merge(spark, landing, _TARGET).changes_read == 0


def _land_changes(landing: Landing) -> LsnWindow:
    """Update 299 adjacent rows, delete the row before them, and insert one row."""
    keys = [str(_FIRST + n) for n in range(300)]
    return landing.land(
        [delete(keys[0], "1", None, None, None)],
        [update(key, "1", "b", "1.00", "x") for key in keys[1:]],
        [insert(keys[5], "2", "a", "1.00", "x"), update(keys[6], "1", "c", "1.00", "x")],
    )
