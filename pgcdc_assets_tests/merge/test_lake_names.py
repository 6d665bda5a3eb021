"""Lakes and tables whose folders have names with a meaning for Spark or Delta."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_COLUMNS = (column("id"), column("v", "text"))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "sibling", "without_key", "row_count"),
    [
        ("a{b}c", "other", "bag", 3),
        ("lake*", "lake_backup", "bag", 3),
        ("lake?", "lake2", "log", 5),
    ],
    ids=["braces", "star", "one"],
)
def test_each_change_of_a_table_without_a_key_is_read_once(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sibling: str,
    without_key: str,
    row_count: int,
) -> None:
    """The names of the siblings of `lake*` and `lake?` match these patterns."""
    merge_by_spark(monkeypatch)
    zone = RawZone(Lake(str(tmp_path / name)), "test")
    landing = Landing(zone, [relation(*_COLUMNS, key=(), identity="f")])
    landing.begin([["1", "same"]] * 2)
    landing.land([insert("1", "same"), insert("2", "x"), delete("2", "x", old_kind="O")])
    shutil.copytree(zone.lake.uri, tmp_path / sibling)
    path = merge(spark, landing, CdcTable("shop", "items", without_key=without_key)).path
    assert spark.read.format("delta").load(path).count() == row_count


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "sibling"), [("a{b}c", "other"), ("lake*", "lake_backup")], ids=["braces", "star"]
)
def test_a_check_reads_the_files_of_its_own_lake(
    spark: SparkSession, tmp_path: Path, name: str, sibling: str
) -> None:
    zone = RawZone(Lake(str(tmp_path / name)), "test")
    landing = Landing(zone, [relation(*_COLUMNS)])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([update("1", "c"), delete("2", None)])
    both = CdcTable("shop", "items", scd=(1, 2))
    for report in merge_tables(spark, zone, [both], landing.windows[-1]):
        assert isinstance(report, MergeReport), report.error
    shutil.copytree(zone.lake.uri, tmp_path / sibling)
    found = [check_all(spark, zone, both, scd) for scd in (1, 2)]
    assert all(each.is_sound for each in found), found
    assert [each.row_count for each in found] == [1, 3]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "sibling"), [("a{b}c", "other"), ("lake*", "lake_backup")], ids=["braces", "star"]
)
def test_spark_rewrites_a_small_table_from_its_own_files(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sibling: str,
) -> None:
    merge_by_spark(monkeypatch)
    zone = RawZone(Lake(str(tmp_path / name)), "test")
    landing = Landing(zone, [relation(*_COLUMNS)])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([update("1", "c")])
    merge(spark, landing, CdcTable("shop", "items"))
    shutil.copytree(zone.lake.uri, tmp_path / sibling)
    landing.land([insert("3", "d")])
    path = merge(spark, landing, CdcTable("shop", "items")).path
    rows = spark.read.format("delta").load(path).select("id", "v").collect()
    assert sorted(map(tuple, rows)) == [(1, "c"), (2, "b"), (3, "d")]


@pytest.mark.sampled
@pytest.mark.parametrize("by_spark", [False, True])
def test_a_lake_that_was_moved_is_merged_and_rebuilt(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_spark: bool
) -> None:
    if by_spark:
        merge_by_spark(monkeypatch)
    zone = RawZone(Lake(str(tmp_path / "before")), "test")
    landing = Landing(zone, [relation(*_COLUMNS)])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([update("1", "c")])
    both = CdcTable("shop", "items", scd=(1, 2))
    list(merge_tables(spark, zone, [both], landing.windows[-1]))
    (tmp_path / "before").rename(tmp_path / "after")
    landing.zone = RawZone(Lake(str(tmp_path / "after")), "test")
    landing.land([delete("2", None), insert("3", "d")])
    for report in merge_tables(spark, landing.zone, [both], landing.windows[-1]):
        assert isinstance(report, MergeReport), report.error
        assert str(tmp_path / "after") in report.path
    rebuilt = [rebuild_table(spark, landing.zone, both, scd) for scd in both.scd]
    rows = [spark.read.format("delta").load(each.path).count() for each in rebuilt]
    assert rows == [2, 4]
    assert not (tmp_path / "before").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("by_spark", [True, False])
@pytest.mark.parametrize(
    ("schema", "table"),
    [
        ("shop", "_delta_log"),
        ("_delta_log", "items"),
        ("shop", "_spark_metadata"),
        ("_spark_metadata", "items"),
    ],
)
def test_a_table_may_have_the_name_of_a_folder_of_delta_or_spark(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    schema: str,
    table: str,
    by_spark: bool,
) -> None:
    """The table is merged, and so is a table beside it that is created later."""
    if by_spark:
        merge_by_spark(monkeypatch)
    own = replace(relation(*_COLUMNS, table=table), schema=schema)
    beside = relation(*_COLUMNS, table="beside", relation_id=2000)
    landing = Landing(zone, [own, beside])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([update("1", "c")])
    both = CdcTable(own.schema, own.table, scd=(1, 2))
    for target in (both, CdcTable("shop", "beside", scd=(1, 2))):
        for report in merge_tables(spark, zone, [target], landing.windows[-1]):
            assert isinstance(report, MergeReport), report.error
    landing.land([delete("2", None), insert("3", "d")])
    for report in merge_tables(spark, zone, [both], landing.windows[-1]):
        assert isinstance(report, MergeReport), report.error
    found = [check_all(spark, zone, both, scd) for scd in (1, 2)]
    assert all(each.is_sound for each in found), found
    assert [each.row_count for each in found] == [2, 4]
    assert [rebuild_table(spark, zone, both, scd).row_count for scd in both.scd] == [2, 4]
