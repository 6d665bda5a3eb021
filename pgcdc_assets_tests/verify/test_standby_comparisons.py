"""Comparisons with a source on a standby."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import Comparison, compare_at, source_moment
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.standby import Source

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

TABLE = CdcTable("public", "t")


def test_a_table_is_compared_with_its_standby(
    source: Source, zone: RawZone, spark: SparkSession
) -> None:
    """B17: the moment of the comparison is one of the standby, and the primary is ahead."""
    primary, standby = source.primary, source.standby
    primary.execute(
        "create table t (id int primary key, v text); create publication pub for table t"
    )
    primary.execute("insert into t values (1, 'a'), (2, 'b')")
    source.wait_for_replay()
    settings = replace(standby.settings(), primary=primary.settings())
    capturing = Capturing(standby, zone, f"s_{standby.name}", standby.conninfo)

    def capture() -> LsnWindow:
        window = LsnWindow.of(1, capturing.captured_through(), source.wait_for_replay())
        capturing.capture(window)
        return window

    def compare() -> Comparison:
        with source_moment(settings, zone, capturing.slot) as moment:
            primary.execute("update t set v = v || '.' where id = 1")
            capture()
            return compare_at(spark, settings, zone, "pub", TABLE, moment)

    try:
        with source.standby_setting("hot_standby_feedback", "on"):
            snapshot_tables(settings, zone, capturing.slot, "pub", [TABLE.name])
            primary.execute("delete from t where id = 2")
            (report,) = merge_tables(spark, zone, [TABLE], capture())
            assert isinstance(report, MergeReport), report.error
            found = compare()
            assert found.is_equal, found
            assert found.source_rows == 1
            primary.execute("insert into t values (3, 'c')")
            found = compare()
            assert found.is_equal, found
            assert found.source_rows == 2
    finally:
        standby.drop_slots()
