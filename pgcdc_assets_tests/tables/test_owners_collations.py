"""SCD tables whose owner has changed the collation of a column."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge

pytestmark = pytest.mark.spark


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
def test_a_collation_of_the_owner_does_not_mix_keys(
    spark: SparkSession, zone: RawZone, scd: int
) -> None:
    target = CdcTable("shop", "items", scd=(scd,))
    landing = Landing(zone, [relation(column("id", "text"), column("v", "text"))])
    landing.begin([["a", "lower"], ["A", "upper"]])
    landing.land([])
    path = merge(spark, landing, target).path
    spark.sql(f"ALTER TABLE {delta_table(path)} ALTER COLUMN id TYPE STRING COLLATE UTF8_LCASE")
    print(spark.sql(f"SHOW TBLPROPERTIES {delta_table(path)}").collect())
    landing.land([update("A", "changed"), insert("b", "low")], [insert("B", "up")])
    (found,) = merge_tables(spark, zone, [target], landing.windows[-1])
    print(found, getattr(found, "error", None))
    rows = spark.read.format("delta").load(path)
    print(rows.select("id", "v").collect())
    assert isinstance(found, MergeReport)
    current = rows.where("_is_current") if scd == 2 else rows
    assert sorted(map(tuple, current.select("id", "v").collect())) == [
        ("A", "changed"),
        ("B", "up"),
        ("a", "lower"),
        ("b", "low"),
    ]
