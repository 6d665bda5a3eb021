"""SCD tables whose owner brings back an earlier version: no merged change is lost unnoticed."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TableRestored
from pgcdc_assets.merge import MergeFailure, merge_tables, rebuild_table
from pgcdc_assets.orchestration.jobs.maintenance import lowest_position
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.current_values import current_values
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.races import during_the_write, right_before_the_write
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark, merge_together

pytestmark = pytest.mark.spark

_TARGETS = {
    "scd1": CdcTable("shop", "items"),
    "scd2": CdcTable("shop", "items", (2,)),
    "soft deletes": CdcTable("shop", "items", soft_deletes=True),
}


def _merged(spark: SparkSession, zone: RawZone, target: CdcTable) -> tuple[Landing, str, int]:
    """Merge two windows; return also the version after the first one."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    path = merge(spark, landing, target).path
    version = DeltaTable(path).version()
    landing.land([update("1", "A"), insert("3", "c")])
    merge(spark, landing, target)
    return landing, path, version


def _refused(spark: SparkSession, landing: Landing, target: CdcTable) -> TableRestored:
    (failure,) = merge_tables(spark, landing.zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TableRestored), failure.error
    return failure.error


def _by_spark(spark: SparkSession, path: str, version: int) -> None:
    spark.sql(f"RESTORE TABLE {delta_table(path)} TO VERSION AS OF {version}")


def _by_time(spark: SparkSession, path: str, version: int) -> None:
    after = DeltaTable(path).history()
    at = next(each["timestamp"] for each in after if each["version"] == version)
    time = dt.datetime.fromtimestamp(at / 1000, dt.UTC).isoformat()
    spark.sql(f"RESTORE TABLE {delta_table(path)} TO TIMESTAMP AS OF '{time}'")


def _by_delta_rs(spark: SparkSession, path: str, version: int) -> None:
    DeltaTable(path).restore(version)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("target", "choose", "restore"),
    [
        pytest.param(_TARGETS["scd1"], merge_together, _by_spark, id="scd1"),
        pytest.param(_TARGETS["scd2"], merge_by_spark, _by_time, id="scd2"),
        pytest.param(_TARGETS["soft deletes"], merge_by_spark, _by_delta_rs, id="soft deletes"),
    ],
)
def test_a_merge_into_restored_rows_is_refused_until_a_rebuild(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    target: CdcTable,
    choose: Callable[[pytest.MonkeyPatch], None],
    restore: Callable[[SparkSession, str, int], None],
) -> None:
    """RESTORE does not reset the watermark: row 3 would be missing until it changes."""
    choose(monkeypatch)
    landing, path, version = _merged(spark, zone, target)
    restore(spark, path, version)
    assert current_values(spark, path) == [(1, "a"), (2, "b")]
    spark.sql(f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES ('mine' = 'x')")
    landing.land([update("2", "B")])
    assert "pgcdc rebuild" in str(_refused(spark, landing, target))
    capture = CdcCapture(name=zone.name, publication="pub", tables=(target,))
    assert lowest_position(zone, capture) is None
    rebuild_table(spark, zone, target, target.scd[0])
    assert current_values(spark, path) == [(1, "A"), (2, "B"), (3, "c")]
    landing.land([update("3", "C")])
    merge(spark, landing, target)
    assert current_values(spark, path) == [(1, "A"), (2, "B"), (3, "C")]


@pytest.mark.sampled
def test_a_restore_that_is_undone_is_no_obstacle(spark: SparkSession, zone: RawZone) -> None:
    """A history may have lost its first changes in the raw zone, so that a rebuild is refused."""
    target = _TARGETS["scd2"]
    landing, path, version = _merged(spark, zone, target)
    _by_spark(spark, path, version)
    _by_spark(spark, path, 0)
    landing.land([update("2", "B")])
    for expected in (version, None):
        error = _refused(spark, landing, target)
        statement = str(error).rpartition("in Spark: ")[2]
        assert statement.endswith(f"AS OF {error.before}")
        spark.sql(statement)
        if expected is None:
            break
        assert current_values(spark, path) == [(1, "a"), (2, "b")]
    merge(spark, landing, target)
    assert current_values(spark, path) == [(1, "A"), (2, "B"), (3, "c")]


@pytest.mark.sampled
@pytest.mark.parametrize("target", _TARGETS.values(), ids=_TARGETS)
def test_a_restore_of_the_newest_merge_is_no_obstacle(
    spark: SparkSession, zone: RawZone, target: CdcTable
) -> None:
    """The owner undoes an UPDATE of their own, and a watermark without rows follows the merge."""
    landing, path, _ = _merged(spark, zone, target)
    version = DeltaTable(path).version()
    spark.sql(f"UPDATE {delta_table(path)} SET v = 'mine'")
    _by_spark(spark, path, version)
    landing.land([update("2", "B")])
    merge(spark, landing, target)
    assert current_values(spark, path) == [(1, "A"), (2, "B"), (3, "c")]


@pytest.mark.sampled
def test_a_clone_over_a_table_is_refused_until_a_rebuild(
    spark: SparkSession, zone: RawZone
) -> None:
    target = _TARGETS["scd1"]
    landing, path, version = _merged(spark, zone, target)
    backup = delta_table(zone.lake.path("backup"))
    spark.sql(f"CREATE TABLE {backup} SHALLOW CLONE {delta_table(path)} VERSION AS OF {version}")
    # Delta refuses a clone over rows.
    spark.sql(f"DELETE FROM {delta_table(path)}")
    spark.sql(f"CREATE OR REPLACE TABLE {delta_table(path)} SHALLOW CLONE {backup}")
    assert current_values(spark, path) == [(1, "a"), (2, "b")]
    landing.land([update("2", "B")])
    _refused(spark, landing, target)
    rebuild_table(spark, zone, target, 1)
    assert current_values(spark, path) == [(1, "A"), (2, "B"), (3, "c")]


@pytest.mark.sampled
@pytest.mark.parametrize("target", _TARGETS.values(), ids=_TARGETS)
def test_a_restore_between_the_plan_and_the_write_of_a_merge_is_noticed(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, target: CdcTable
) -> None:
    """Spark merges into the older rows, and the commit of the merge is newer than the RESTORE."""
    merge_by_spark(monkeypatch)
    landing, path, version = _merged(spark, zone, target)
    landing.land([update("2", "B")])
    with right_before_the_write(spark, lambda: _by_delta_rs(spark, path, version)):
        _refused(spark, landing, target)
    landing.land([insert("4", "d")])
    for _ in range(2):
        error = _refused(spark, landing, target)
        assert error.before is None and "undo" not in str(error)
    rebuild_table(spark, zone, target, target.scd[0])
    landing.land([update("3", "C")])
    merge(spark, landing, target)
    assert current_values(spark, path) == [(1, "A"), (2, "B"), (3, "C"), (4, "d")]


@pytest.mark.sampled
def test_a_restore_of_the_newest_merge_before_the_write_of_the_next_is_no_obstacle(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_by_spark(monkeypatch)
    target = _TARGETS["scd1"]
    landing, path, _ = _merged(spark, zone, target)
    version = DeltaTable(path).version()
    spark.sql(f"UPDATE {delta_table(path)} SET v = 'mine'")
    landing.land([insert("4", "d")])
    with right_before_the_write(spark, lambda: _by_spark(spark, path, version)):
        merge(spark, landing, target)
    landing.land([insert("5", "e")])
    merge(spark, landing, target)
    assert [key for key, _ in current_values(spark, path)] == [1, 2, 3, 4, 5]


@pytest.mark.sampled
def test_changes_that_a_restore_takes_from_a_merge_that_writes_are_noticed(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Delta refuses a write beside a RESTORE of files that the write has read."""
    merge_by_spark(monkeypatch)
    target = _TARGETS["scd1"]
    landing, path, version = _merged(spark, zone, target)
    landing.land([insert("4", "d")])
    with during_the_write(spark, tmp_path, lambda: _by_delta_rs(spark, path, version)):
        (report,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(report, MergeFailure)
    _refused(spark, landing, target)
