"""A range of a history that is written anew: what lies outside stays, and when it is not done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import MergeFailure, MergeReport, TableTarget, lasting, merge_tables
from pgcdc_assets.merge.sql import delta_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.merge.history import Landing, delete, insert, update
from pgcdc_assets_tests.merge.random_history import bound_merges, random_relation

pytestmark = pytest.mark.spark

_TARGET = TableTarget("shop", "items", scd=(2,))
_ROWS = 5_000
_FIRST = 4_000


@pytest.fixture
def landing(zone: RawZone, monkeypatch: pytest.MonkeyPatch) -> Landing:
    """A copy of 5,000 rows; tables of any size count as large."""
    bound_merges(monkeypatch)
    landing = Landing(zone, [random_relation("d")])
    landing.begin([[str(n), "1", "a", "1.00", "x"] for n in range(_ROWS)])
    # An update that changes nothing.
    landing.land([update("0", "1", "a", "1.00", "x")])
    return landing


def test_what_lies_outside_the_range_stays_where_it_is(
    spark: SparkSession, landing: Landing
) -> None:
    """And what lies in it has the versions that there were, counted as a MERGE counts them."""
    _merge(spark, landing)
    _land_changes(landing)
    report = _merge(spark, landing)
    assert report.watermark_after == landing.windows[-1].end
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (301, 300, 0)
    assert report.row_count == _ROWS + 301
    last = _log(report)[0]
    assert last["operation"] == "WRITE"
    # Of 5,000 rows those of a widened range of 300 keys.
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
    assert _merge(spark, landing).changes_read == 0


def test_a_column_that_somebody_added_keeps_its_values(
    spark: SparkSession, landing: Landing
) -> None:
    path = _merge(spark, landing).path
    spark.sql(f"ALTER TABLE {delta_table(path)} ADD COLUMNS (extra STRING)")
    spark.sql(f"UPDATE {delta_table(path)} SET extra = 'mine'")
    _land_changes(landing)
    assert _log(_merge(spark, landing))[0]["operation"] == "MERGE"
    assert spark.read.format("delta").load(path).where("extra = 'mine'").count() == _ROWS


def test_change_data_has_no_row_that_stayed(spark: SparkSession, landing: Landing) -> None:
    path = _merge(spark, landing).path
    spark.sql(
        f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES (delta.enableChangeDataFeed = true)"
    )
    _land_changes(landing)
    _merge(spark, landing)
    version = _log_of(path)[0]["version"]
    changed = spark.read.option("readChangeFeed", "true").option("startingVersion", version)
    # 300 versions ended, before and after, and 301 new ones.
    assert changed.format("delta").load(path).count() == 901


@pytest.mark.parametrize(
    "per_change",
    [
        pytest.param(-1, id="merged", marks=pytest.mark.soak),
        pytest.param(1_000_000, id="written anew"),
    ],
)
def test_a_merge_that_another_overtakes_writes_nothing(
    spark: SparkSession,
    landing: Landing,
    monkeypatch: pytest.MonkeyPatch,
    per_change: int,
) -> None:
    """Its versions follow from rows that are current no more."""
    monkeypatch.setattr(lasting, "REPLACED_PER_CHANGE", per_change)
    _merge(spark, landing)
    first = _land_changes(landing)
    landing.land([update(str(_FIRST + 1), "1", "c", "1.00", "x")])
    find_touched = lasting.find_touched
    overtaking: list[Callable[[], MergeReport]] = [lambda: _merge(spark, landing, first)]

    def overtaken(*args: Any, **more: Any) -> Any:
        found = find_touched(*args, **more)
        if overtaking:
            overtaking.pop()()
        return found

    monkeypatch.setattr(lasting, "find_touched", overtaken)
    (failure,) = merge_tables(spark, landing.zone, [_TARGET], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TransientError), failure.error
    assert "was merged by somebody else meanwhile" in str(failure.error)
    report = _merge(spark, landing)
    versions = (
        spark.read.format("delta")
        .load(report.path)
        .where(f"history = {_FIRST + 1}")
        .orderBy("_valid_from_lsn")
        .collect()
    )
    assert [(r.doc, r._is_current) for r in versions] == [("a", False), ("b", False), ("c", True)]


def _land_changes(landing: Landing) -> LsnWindow:
    """Update 299 neighbours, delete the one before them and insert a row of one of them."""
    keys = [str(_FIRST + n) for n in range(300)]
    return landing.land(
        [delete(keys[0], "1", None, None, None)],
        [update(key, "1", "b", "1.00", "x") for key in keys[1:]],
        [insert(keys[5], "2", "a", "1.00", "x"), update(keys[6], "1", "c", "1.00", "x")],
    )


def _merge(spark: SparkSession, landing: Landing, through: LsnWindow | None = None) -> MergeReport:
    (report,) = merge_tables(spark, landing.zone, [_TARGET], through or landing.windows[-1])
    assert isinstance(report, MergeReport), report.error.__cause__ or report.error
    return report


def _log(report: MergeReport) -> list[dict[str, Any]]:
    return _log_of(report.path)


def _log_of(path: str) -> list[dict[str, Any]]:
    return DeltaTable(path).history()
