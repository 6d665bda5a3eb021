"""A rebuild through an LSN does not count on a snapshot above the LSN."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import SchemaChangeError
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge

pytestmark = pytest.mark.spark

_BEFORE = relation(column("id"), column("v", "text"))
_AFTER = relation(column("id"), column("v", "int4"))


@pytest.mark.sampled
def test_a_change_that_only_a_later_snapshot_has_is_refused(
    spark: SparkSession, zone: RawZone
) -> None:
    """The rows that `USING length(v)` has changed are in no change of the stream."""
    target = CdcTable("shop", "items")
    landing = Landing(zone, [_BEFORE, _AFTER])
    landing.begin([["1", "a"], ["2", "ab"]])
    through = landing.land([update("1", "1", version=2)]).end
    landing.land([])
    landing.copy([["1", "1"], ["2", "2"]], version=2)
    landing.land([insert("3", "3", version=2)])
    path = merge(spark, landing, target).path
    with pytest.raises(SchemaChangeError, match="its type changed from text to int4"):
        rebuild_table(spark, zone, target, 1, through)
    rows = spark.read.format("delta").load(path).select("id", "v").collect()
    assert sorted(map(tuple, rows)) == [(1, 1), (2, 2), (3, 3)]
    assert rebuild_table(spark, zone, target, 1).row_count == 3
