"""Logs of changes whose source table gets a key, or loses it."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge import MergeFailure, merge_tables
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation
from pgcdc_assets_tests.support.merge.one_table import merge

pytestmark = [pytest.mark.spark, pytest.mark.slow]

LOG = CdcTable("shop", "items", without_key="log")
_COLUMNS = (column("id"), column("v", "text"))
_WITH_KEY = relation(*_COLUMNS)
_WITHOUT_KEY = relation(*_COLUMNS, key=(), identity="f")


@pytest.mark.sampled
@pytest.mark.parametrize("gets_key", [True, False], ids=["gets", "loses"])
def test_a_rebuild_begins_with_the_snapshot_after_the_key_has_changed(
    spark: SparkSession, zone: RawZone, gets_key: bool
) -> None:
    """The merge asks for the rebuild, because the rebuild removes the contents before."""
    versions = (_WITHOUT_KEY, _WITH_KEY) if gets_key else (_WITH_KEY, _WITHOUT_KEY)
    landing = Landing(zone, versions)
    landing.begin([["1", "a"]])
    first = landing.land([insert("2", "b")])
    merge(spark, landing, LOG)
    landing.land([insert("3", "c")])
    landing.copy([["1", "a"], ["2", "b"], ["3", "c"]], version=2)
    landing.land([insert("4", "d", version=2)])
    (failure,) = merge_tables(spark, zone, [LOG], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, ConfigurationError)
    command = f"pgcdc rebuild {zone.name} {LOG.qualified_name}"
    assert f"or the key of its source. Rebuild the table with: {command}" in str(failure.error)

    path = rebuild_table(spark, zone, LOG, 1).path
    landing.land([insert("5", "e", version=2)])
    merge(spark, landing, LOG)
    frame = spark.read.format("delta").load(path)
    assert ("_op" in frame.columns) is not gets_key
    rows = sorted(map(tuple, frame.select("id", "v").collect()))
    assert rows == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]
    rebuild_table(spark, zone, LOG, 1, first.end)
    assert ("_op" in spark.read.format("delta").load(path).columns) is gets_key
