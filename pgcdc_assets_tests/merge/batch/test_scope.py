"""Tables at the border of what is merged without Spark: both ways have the same rows."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify.table_version import read_table_version
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import (
    merge_by_spark,
    merge_together,
    merges_by_spark,
)

pytestmark = pytest.mark.spark


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
@pytest.mark.parametrize("together", [True, False], ids=["together", "by spark"])
def test_a_part_of_the_identity_as_key_never_takes_a_value_of_another_row(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    scd: int,
    together: bool,
) -> None:
    """The old row of the key leaves between the insert and the update of the new row."""
    (merge_together if together else merge_by_spark)(monkeypatch)
    columns = [column("a", is_key=True), column("b", is_key=True), column("doc", "text")]
    landing = Landing(zone, [relation(*columns, key=(), identity="i")])
    target = CdcTable("shop", "items", scd=(scd,), key=("a",))
    landing.begin([["1", "1", "old"]])
    landing.land([])
    path = merge(spark, landing, target).path
    landing.land(
        [insert("1", "2", "new"), delete("1", "1", None), update("1", "2", None, unchanged=(2,))]
    )
    merge(spark, landing, target)
    rows = spark.read.format("delta").load(path).where("b = 2")
    if scd == 2:
        rows = rows.where("_is_current")
    assert [row["doc"] for row in rows.collect()] == ["new"]


def test_changes_from_before_a_column_of_the_identity_are_left_to_spark(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_together(monkeypatch)
    columns = [column("a"), column("b", missing="7")]
    before = relation(columns[0], key=(), identity="f")
    landing = Landing(zone, [before, relation(*columns, key=("a", "b"))])
    landing.begin()
    landing.land(
        [insert("1"), insert("2")],
        [insert("1", "8", version=2), delete("1", "7", version=2), delete("2", "7", version=2)],
    )
    report = merge(spark, landing, CdcTable("shop", "items", key=("a",)))
    assert report.spark_reason == "older changes lack a column of the replica identity"
    rows = spark.read.format("delta").load(report.path).select("a", "b").collect()
    assert list(map(tuple, rows)) == [(1, 8)]


def test_a_source_column_with_the_name_of_a_column_of_histories_is_null_in_older_rows(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files from before the column do not have it. An SCD1 table may have such a column."""
    merge_together(monkeypatch)
    before = relation(column("id"), column("v", "text"))
    after = relation(column("id"), column("v", "text"), column("_is_current", "bool"))
    landing = Landing(zone, [before, after])
    landing.begin([["1", "a"]])
    landing.land([])
    target = CdcTable("shop", "items")
    path = merge(spark, landing, target).path
    # As large as a table of which a MERGE leaves the older file.
    with monkeypatch.context() as patched:
        patched.setattr("pgcdc_assets.merge.kinds.current_image.is_tiny", lambda *_: False)
        landing.land([insert("2", "b", "t", version=2)])
        merge(spark, landing, target)
    by_spark = merges_by_spark(path)
    landing.land([insert("3", "c", "f", version=2)])
    merge(spark, landing, target)
    assert merges_by_spark(path) == by_spark
    found = spark.read.format("delta").load(path).collect()
    assert {row["id"]: row["_is_current"] for row in found} == {1: None, 2: True, 3: False}


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
@pytest.mark.parametrize(
    ("name", "value", "is_left"),
    [
        ("delta.logRetentionDuration", "interval 30 days", False),
        ("delta.enableChangeDataFeed", "true", True),
    ],
)
def test_properties_that_the_owner_sets_by_delta_rs_leave_a_table_together(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    scd: int,
    name: str,
    value: str,
    is_left: bool,
) -> None:
    """delta-rs adds the feature variantType. A change feed needs Spark."""
    merge_together(monkeypatch)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    target = CdcTable("shop", "items", scd=(scd,))
    path = merge(spark, landing, target).path
    DeltaTable(path).alter.set_table_properties({name: value})
    assert "variantType" in (DeltaTable(path).protocol().reader_features or ())
    landing.land([update("1", "changed"), delete("2", None), insert("3", "c")])
    merge(spark, landing, target)
    assert (merges_by_spark(path) > 0) is is_left
    rows = spark.read.format("delta").load(path).where("true" if scd == 1 else "_is_current")
    assert {(row["id"], row["v"]) for row in rows.collect()} == {(1, "changed"), (3, "c")}
    pinned = read_table_version(zone, path, "shop.items", zone.epochs.all())
    # The checks pass the files to Spark, past Delta.
    assert pinned.files is not None
