"""Merges by compiled code and with adaptive planning, as users have them for larger tables.

The sessions of tests are interpreted, which is faster for a few rows. The random tests of large
tables are compiled too, but a short run has few of them. These tests are small, for each short run.
"""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import log_of, merge
from pgcdc_assets_tests.support.merge.races import COPIED, ITEMS, RACES
from pgcdc_assets_tests.support.merge.user_settings import merge_as_users

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("kind", ["current_image", "history", "bag"])
def test_changes_are_merged_with_the_settings_of_users(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    table = RACES[kind]
    landing = table.land_snapshot(zone)
    path = merge(spark, landing, table.target).path
    landing.land(table.first)
    landing.land(table.second)
    merge_as_users(monkeypatch)
    merge(spark, landing, table.target)
    assert log_of(path)[0]["operation"] == "MERGE"
    assert table.contents(spark, path) == table.outcome


def test_a_column_is_added_with_the_settings_of_users(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1, D5: an update has the new column and an unchanged value."""
    before = [column("id"), column("v", "text")]
    landing = Landing(zone, [relation(*before), relation(*before, column("more", "text"))])
    landing.begin(COPIED)
    landing.land([])
    path = merge(spark, landing, ITEMS).path
    changed = update("1", None, "x", unchanged=(1,), version=2)
    landing.land([update("2", "B"), changed], [insert("4", "d", "y", version=2)])
    merge_as_users(monkeypatch)
    merge(spark, landing, ITEMS)
    assert log_of(path)[0]["operation"] == "MERGE"
    rows = spark.read.format("delta").load(path).select("id", "v", "more").collect()
    assert sorted(map(tuple, rows)) == [
        (1, "a", "x"),
        (2, "B", None),
        (3, "c", None),
        (4, "d", "y"),
    ]
