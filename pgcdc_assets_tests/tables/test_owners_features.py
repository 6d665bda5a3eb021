"""Features that the owner of an SCD table has turned on, and that delta-rs does not write."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge import rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge

pytestmark = pytest.mark.spark

_ITEMS = CdcTable("shop", "items")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "feature",
    [
        "TypeWidening",
        "VariantShredding",
        pytest.param("InCommitTimestamps", marks=pytest.mark.soak),
    ],
)
def test_a_table_with_a_feature_and_deletion_vectors_is_merged_and_rebuilt(
    spark: SparkSession, zone: RawZone, feature: str
) -> None:
    """delta-rs cannot read the deletion vectors of a table with one of the first two features."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["2", "b"], ["3", "c"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    table = delta_table(path)
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enable{feature}' = 'true')")
    spark.sql(f"DELETE FROM {table} WHERE id = 2")
    landing.land([update("1", "A")])
    assert merge(spark, landing, _ITEMS).row_count == 2
    assert rebuild_table(spark, zone, _ITEMS, 1).row_count == 3
    landing.land([insert("4", "d")])
    assert merge(spark, landing, _ITEMS).row_count == 4
    rows = spark.read.format("delta").load(path).select("id", "v").collect()
    assert sorted(map(tuple, rows)) == [(1, "A"), (2, "b"), (3, "c"), (4, "d")]


@pytest.mark.sampled
def test_a_table_whose_owner_has_dropped_a_feature_is_rebuilt(
    spark: SparkSession, zone: RawZone
) -> None:
    """Delta then adds the feature checkpointProtection, which delta-rs does not write."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    table = delta_table(path)
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'false')")
    spark.sql(f"ALTER TABLE {table} DROP FEATURE deletionVectors")
    spark.sql(f"DELETE FROM {table} WHERE id = 2")
    assert rebuild_table(spark, zone, _ITEMS, 1).row_count == 2
    landing.land([insert("3", "c")])
    assert merge(spark, landing, _ITEMS).row_count == 3
