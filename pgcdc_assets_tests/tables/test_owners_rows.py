"""Rows that the owner of an SCD1 table has added by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge.kinds import current_image
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark, merge_together

pytestmark = pytest.mark.spark

_ITEMS = CdcTable("shop", "items")


@pytest.mark.sampled
@pytest.mark.parametrize("choose", [merge_by_spark, merge_together])
def test_changes_of_the_source_replace_rows_without_a_position(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    choose: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """The system columns of such a row are NULL. No change would ever be later than NULL."""
    choose(monkeypatch)
    # Otherwise Spark rewrites the tiny table.
    monkeypatch.setattr(current_image, "is_tiny", lambda *sizes: False)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    rows = spark.sql("SELECT id, 'mine' AS v FROM VALUES (2), (3), (4) AS t (id)")
    rows.write.format("delta").mode("append").save(path)
    landing.land([insert("2", "b"), delete("3", None), update("4", "c")])
    merge(spark, landing, _ITEMS)
    found = spark.read.format("delta").load(path).select("id", "v").collect()
    assert sorted(map(tuple, found)) == [(1, "a"), (2, "b"), (4, "c")]
