"""Columns of the source that the owner of an SCD table drops, renames or removes otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TableRefused
from pgcdc_assets.merge import MergeFailure, merge_tables, rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark, merge_together

pytestmark = pytest.mark.spark

_BEFORE = relation(column("id"), column("v", "text"))
_AFTER = relation(column("id"), column("v", "text"), column("w", "int4"))
_TARGETS = {
    "scd1": CdcTable("shop", "items"),
    "scd2": CdcTable("shop", "items", (2,)),
    "soft deletes": CdcTable("shop", "items", soft_deletes=True),
}
_each_target = pytest.mark.parametrize("target", _TARGETS.values(), ids=_TARGETS)


def _rows(spark: SparkSession, path: str) -> list[tuple[Any, ...]]:
    rows = spark.read.format("delta").load(path)
    if "_is_current" in rows.columns:
        rows = rows.where("_is_current")
    return sorted(map(tuple, rows.select("id", "v", "w").collect()))


def _merged(spark: SparkSession, zone: RawZone, target: CdcTable) -> tuple[Landing, str]:
    """Merge a table that has got column `w` after its creation, and turn on column mapping."""
    landing = Landing(zone, [_BEFORE, _AFTER])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    merge(spark, landing, target)
    landing.land([update("1", "a", "7", version=2), insert("3", "c", "8", version=2)])
    path = merge(spark, landing, target).path
    spark.sql(
        f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    )
    landing.land([update("2", "B", "9", version=2)])
    return landing, path


def _refused(spark: SparkSession, landing: Landing, target: CdcTable, name: str) -> str:
    (failure,) = merge_tables(spark, landing.zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TableRefused), failure.error
    assert f'lacks "{name}", which' in str(failure.error)
    return str(failure.error)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("target", "choose", "name"),
    [
        pytest.param(_TARGETS["scd1"], merge_together, "v", id="scd1"),
        pytest.param(_TARGETS["scd2"], merge_by_spark, "w", id="scd2"),
        pytest.param(_TARGETS["soft deletes"], merge_by_spark, "v", id="soft deletes"),
    ],
)
def test_a_dropped_column_of_the_source_stops_the_table_until_a_rebuild(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    target: CdcTable,
    choose: Callable[[pytest.MonkeyPatch], None],
    name: str,
) -> None:
    """The merge would add the column again, and row 3 would have NULL until it changes."""
    choose(monkeypatch)
    landing, path = _merged(spark, zone, target)
    spark.sql(f"ALTER TABLE {delta_table(path)} DROP COLUMN {name}")
    for _ in range(2):
        command = f"pgcdc rebuild NAME {target.qualified_name}"
        assert command in _refused(spark, landing, target, name)
    assert name not in spark.read.format("delta").load(path).columns
    rebuild_table(spark, zone, target, target.scd[0])
    landing.land([insert("4", "d", None, version=2)])
    merge(spark, landing, target)
    assert _rows(spark, path) == [(1, "a", 7), (2, "B", 9), (3, "c", 8), (4, "d", None)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(_TARGETS["scd1"], "w", id="scd1"),
        pytest.param(_TARGETS["scd2"], "v", id="scd2"),
    ],
)
def test_an_owner_may_add_a_dropped_column_again(
    spark: SparkSession, zone: RawZone, target: CdcTable, name: str
) -> None:
    """A history may have lost its first changes in the raw zone, so that a rebuild is refused."""
    landing, path = _merged(spark, zone, target)
    spark.sql(f"ALTER TABLE {delta_table(path)} DROP COLUMN {name}")
    error = _refused(spark, landing, target, name)
    spark.sql(error.partition("in Spark: ")[2].partition(";")[0])
    merge(spark, landing, target)
    expected = {
        "v": [(1, None, 7), (2, "B", 9), (3, None, 8)],
        "w": [(1, "a", None), (2, "B", 9), (3, "c", None)],
    }
    assert _rows(spark, path) == expected[name]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["v", "w"])
def test_a_renamed_column_of_the_source_loses_no_value(
    spark: SparkSession, zone: RawZone, name: str
) -> None:
    """The metadata of a column identifies the column. A column that was added has none."""
    target = _TARGETS["scd1"]
    landing, path = _merged(spark, zone, target)
    spark.sql(f"ALTER TABLE {delta_table(path)} RENAME COLUMN {name} TO renamed")
    if name == "w":
        _refused(spark, landing, target, name)
        spark.sql(f"ALTER TABLE {delta_table(path)} RENAME COLUMN renamed TO {name}")
    merge(spark, landing, target)
    assert _rows(spark, path) == [(1, "a", 7), (2, "B", 9), (3, "c", 8)]


@pytest.mark.sampled
@_each_target
def test_a_column_that_an_unfinished_merge_has_not_added_yet_is_not_lost(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, target: CdcTable
) -> None:
    """The merge was killed between the properties and ADD COLUMNS."""
    landing = Landing(zone, [_BEFORE, _AFTER])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    path = merge(spark, landing, target).path
    landing.land([update("1", "a", "7", version=2), insert("3", "c", "8", version=2)])
    real = type(spark).sql

    def killed(session: SparkSession, text: str, *args: Any, **more: Any) -> Any:
        if "ADD COLUMNS" in text:
            raise OSError("killed")
        return real(session, text, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(type(spark), "sql", killed)
        (failure,) = merge_tables(spark, zone, [target], landing.windows[-1])
        assert isinstance(failure, MergeFailure)
    assert "w" not in spark.read.format("delta").load(path).columns
    merge(spark, landing, target)
    assert _rows(spark, path) == [(1, "a", 7), (2, "b", None), (3, "c", 8)]
