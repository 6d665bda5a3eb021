"""Settings of a table's owner survive a new snapshot and a rebuild."""

from __future__ import annotations

from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.errors import DefiniteError, MergeConflict
from pgcdc_assets.merge import MergeFailure, merge_tables, rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
)
from pgcdc_assets_tests.support.merge.one_table import merge

pytestmark = pytest.mark.spark

_ITEMS = CdcTable("shop", "items")
_BEFORE = relation(column("id"), column("v", "text"), column("gone", "text"))
_AFTER = relation(
    column("id"), column("v", "text", attnum=2), column("at", "timestamp", attnum=4, type_oid=1114)
)


def _described(spark: SparkSession, path: str) -> dict[str, Any]:
    detail = spark.sql(f"DESCRIBE DETAIL {delta_table(path)}").collect()[0].asDict()
    wanted = "delta.enableChangeDataFeed", "delta.enableRowTracking", "delta.constraints.short"
    schema = spark.read.format("delta").load(path).schema
    return {
        "description": detail["description"],
        "clustering": detail["clusteringColumns"],
        "properties": {name: detail["properties"].get(name) for name in (*wanted, "mine")},
        "comment": schema["v"].metadata.get("comment"),
        "columns": [field.name for field in schema],
    }


def _own(spark: SparkSession, path: str) -> dict[str, Any]:
    """Set properties, comments and constraints, as the owner of a table may."""
    table = delta_table(path)
    for statement in (
        f"COMMENT ON TABLE {table} IS 'what we sell'",
        f"ALTER TABLE {table} CLUSTER BY (id)",
        f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true', "
        "'delta.enableRowTracking' = 'true', 'mine' = 'x')",
        f"ALTER TABLE {table} ADD CONSTRAINT short CHECK (length(v) < 10)",
        f"ALTER TABLE {table} ALTER COLUMN v COMMENT 'its name'",
        f"ALTER TABLE {table} ADD COLUMNS (extra STRING COMMENT 'ours')",
    ):
        spark.sql(statement)
    return _described(spark, path)


def _copied_again(zone: RawZone) -> Landing:
    landing = Landing(zone, [_BEFORE, _AFTER])
    landing.begin([["1", "a", "x"], ["2", "b", "y"]])
    landing.land([])
    return landing


@pytest.mark.sampled
def test_a_new_snapshot_keeps_the_settings_of_the_owner(spark: SparkSession, zone: RawZone) -> None:
    """A dropped source column is removed. A column of the owner is kept, without values."""
    landing = _copied_again(zone)
    path = merge(spark, landing, _ITEMS).path
    owned = _own(spark, path)
    landing.land([])
    landing.copy([["1", "A", None], ["3", "c", "2024-01-01 00:00:00"]], version=2)
    landing.land([insert("4", "d", None, version=2)])
    merge(spark, landing, _ITEMS)
    found = _described(spark, path)
    columns = [name for name in owned["columns"] if name != "gone"]
    columns.insert(2, "at")
    assert sorted(found.pop("columns")) == sorted(columns)
    owned.pop("columns")
    assert found == owned
    rows = spark.read.format("delta").load(path).select("id", "v", "extra").collect()
    assert sorted(map(tuple, rows)) == [(1, "A", None), (3, "c", None), (4, "d", None)]


@pytest.mark.sampled
def test_a_rebuild_keeps_the_settings_of_the_owner(spark: SparkSession, zone: RawZone) -> None:
    landing = _copied_again(zone)
    path = merge(spark, landing, _ITEMS).path
    owned = _own(spark, path)
    landing.land([insert("4", "d", "z")])
    merge(spark, landing, _ITEMS)
    rebuild_table(spark, zone, _ITEMS, 1)
    found = _described(spark, path)
    assert sorted(found.pop("columns")) == sorted(owned.pop("columns"))
    assert found == owned
    rows = spark.read.format("delta").load(path).select("id", "v", "extra").collect()
    assert sorted(map(tuple, rows)) == [(1, "a", None), (2, "b", None), (4, "d", None)]


@pytest.mark.sampled
def test_a_violated_constraint_of_the_owner_is_a_definite_error(
    spark: SparkSession, zone: RawZone
) -> None:
    """A retry would fail again. The sentence names the constraint, without a value."""
    landing = _copied_again(zone)
    path = merge(spark, landing, _ITEMS).path
    _own(spark, path)
    version = DeltaTable(path).version()
    landing.land([insert("4", "much too long", "z")])
    (failure,) = merge_tables(spark, zone, [_ITEMS], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, MergeConflict), failure.error
    assert "DELTA_VIOLATE_CONSTRAINT" in str(failure.error)
    assert "too long" not in str(failure.error)
    assert DeltaTable(path).version() == version


@pytest.mark.sampled
def test_a_rebuild_writes_no_row_that_a_constraint_of_the_owner_refuses(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = _copied_again(zone)
    path = merge(spark, landing, _ITEMS).path
    spark.sql(f"ALTER TABLE {delta_table(path)} ADD CONSTRAINT short CHECK (length(v) < 10)")
    landing.land([insert("4", "much too long", "z")])
    with pytest.raises(DefiniteError, match="DELTA_VIOLATE_CONSTRAINT") as raised:
        rebuild_table(spark, zone, _ITEMS, 1)
    assert "too long" not in str(raised.value)
    assert spark.read.format("delta").load(path).count() == 2
    spark.sql(f"ALTER TABLE {delta_table(path)} DROP CONSTRAINT short")
    assert rebuild_table(spark, zone, _ITEMS, 1).row_count == 3


@pytest.mark.soak
def test_a_table_with_column_mapping_accepts_a_new_snapshot(
    spark: SparkSession, zone: RawZone
) -> None:
    before = relation(column("id"), column("two words", "text"))
    after = relation(column("id"), column("three new words", "text", attnum=3))
    landing = Landing(zone, [before, after])
    landing.begin([["1", "a"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    landing.land([])
    landing.copy([["2", "b"]], version=2)
    landing.land([insert("3", "c", version=2)])
    merge(spark, landing, _ITEMS)
    rows = spark.read.format("delta").load(path).select("id", "three new words").collect()
    assert sorted(map(tuple, rows)) == [(2, "b"), (3, "c")]
    assert "two words" not in spark.read.format("delta").load(path).columns


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_column_renamed_only_in_case_is_merged_after_a_new_snapshot(
    spark: SparkSession, zone: RawZone, scd: int
) -> None:
    """Delta treats the names as equal, so the column gets the new name and keeps its values."""
    target = CdcTable("shop", "items", scd=(scd,))
    day = {"type_oid": 1082}
    before = relation(column("id"), column("Name", "date", **day))
    after = relation(column("id"), column("name", "date", **day))
    landing = Landing(zone, [before, after])
    landing.begin([["1", "infinity"], ["2", "2024-01-02"]])
    landing.land([])
    path = merge(spark, landing, target).path
    landing.land([])
    landing.copy([["1", "infinity"], ["2", "2024-01-03"]], version=2)
    landing.land([insert("3", "2024-01-04", version=2)])
    merge(spark, landing, target)
    table = spark.read.format("delta").load(path)
    assert "name" in table.columns
    assert "Name" not in table.columns
    current = table.where("_is_current") if scd == 2 else table
    rows = current.selectExpr("id", "CAST(name AS STRING)", "_rescued['name']").collect()
    assert sorted(map(tuple, rows)) == [
        (1, None, "infinity"),
        (2, "2024-01-03", None),
        (3, "2024-01-04", None),
    ]
    assert table.count() == (4 if scd == 2 else 3)


@pytest.mark.sampled
@pytest.mark.parametrize("target", [_ITEMS, CdcTable("shop", "items", soft_deletes=True)])
def test_a_clustered_table_stays_clustered(
    spark: SparkSession, zone: RawZone, target: CdcTable
) -> None:
    """Merges rewrite a tiny table, and replace all rows after a TRUNCATE."""
    landing = Landing(zone, [_BEFORE])
    landing.begin([["1", "a", "x"], ["2", "b", "y"]])
    landing.land([])
    path = merge(spark, landing, target).path
    spark.sql(f"ALTER TABLE {delta_table(path)} CLUSTER BY (v)")
    for changes in (
        [insert("3", "c", "z"), delete("1", None, None)],
        [truncate(), insert("4", "d", "z")],
        [truncate()],
    ):
        landing.land(changes)
        merge(spark, landing, target)
        assert _described(spark, path)["clustering"] == ["v"]
    rows = spark.read.format("delta").load(path)
    assert rows.count() == (4 if target.soft_deletes else 0)


@pytest.mark.sampled
@pytest.mark.parametrize("ends_by", ["merge", "rebuild", "owner"])
@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_table_is_clustered_again_after_a_kill_within_an_overwrite(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    ends_by: str,
    is_renamed: bool,
) -> None:
    """The overwrite removes the clustering, and another commit adds it again."""
    key = "key" if is_renamed else "id"
    after = relation(column(key, attnum=1), column("v", "text"), key=(key,))
    landing = Landing(zone, [_BEFORE, after])
    landing.begin([["1", "a", "x"], ["2", "b", "y"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    spark.sql(f"ALTER TABLE {delta_table(path)} CLUSTER BY (id, v)")
    landing.land([insert("3", "c", version=2)])

    def die(name: str) -> None:
        if name == failpoints.AFTER_CLUSTERED_OVERWRITE:
            raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "reach", die)
        (failure,) = merge_tables(spark, zone, [_ITEMS], landing.windows[-1])
        assert isinstance(failure, MergeFailure)
    assert _described(spark, path)["clustering"] == []
    expected = [key, "v"]
    if ends_by == "owner":
        spark.sql(f"ALTER TABLE {delta_table(path)} CLUSTER BY (v)")
        expected = ["v"]
    elif ends_by == "rebuild":
        rebuild_table(spark, zone, _ITEMS, 1)
    merge(spark, landing, _ITEMS)
    assert _described(spark, path)["clustering"] == expected
    assert "pgcdc.clustered_by" not in DeltaTable(path).metadata().configuration
    assert spark.read.format("delta").load(path).count() == 3
