"""When the watermarks of tables without changes are recorded."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.merge.idle_tables import IDLE_WINDOWS, TABLES_TO_RECORD
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import read_watermark
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation

pytestmark = pytest.mark.spark

TABLES = [f"t{number:02d}" for number in range(2 * TABLES_TO_RECORD + 2)]
TARGETS = [CdcTable("shop", table) for table in TABLES]


@pytest.fixture
def landing(spark: SparkSession, zone: RawZone) -> Landing:
    """Return a raw zone of small tables that are merged."""
    numbered = enumerate(TABLES, start=1000)
    landing = Landing(zone, [relation(column("id"), table=t, relation_id=n) for n, t in numbered])
    landing.begin()
    merge(spark, landing, landing.land([insert("1", relation_id=1000)]))
    return landing


def merge(spark: SparkSession, landing: Landing, window: LsnWindow) -> list[str]:
    """Merge all tables; return those whose watermark was recorded."""
    reports = list(merge_tables(spark, landing.zone, TARGETS, window))
    assert sorted(report.table for report in reports) == TABLES
    recorded = []
    for report in reports:
        assert isinstance(report, MergeReport), report
        assert report.watermark_after == window.end
        if report.has_committed:
            recorded.append(report.table)
    return recorded


def reached(landing: Landing) -> set[str]:
    """Return the tables whose log has the watermark of the newest window."""
    zone, end = landing.zone, landing.windows[-1].end_position
    marks = {t: read_watermark(zone.lake, zone.name, "shop", t, 1) for t in TABLES}
    return {table for table, mark in marks.items() if mark == end}


def test_tables_that_fall_behind_together_are_recorded_by_several_merges(
    spark: SparkSession, landing: Landing
) -> None:
    recorded = [merge(spark, landing, landing.land([])) for _ in range(IDLE_WINDOWS - 1)]
    assert not any(recorded)
    following = [merge(spark, landing, landing.land([])) for _ in range(4)]
    assert [len(each) for each in following] == [TABLES_TO_RECORD, TABLES_TO_RECORD, 2, 0]
    assert sorted(table for each in following for table in each) == TABLES


def test_a_merge_of_many_windows_records_all_tables(spark: SparkSession, landing: Landing) -> None:
    """A run each day would otherwise leave the tables behind by days."""
    for _ in range(4 * IDLE_WINDOWS):
        window = landing.land([])
    assert merge(spark, landing, window) == TABLES
    assert reached(landing) == set(TABLES)


def test_the_table_that_is_furthest_behind_is_recorded_first(
    spark: SparkSession, landing: Landing
) -> None:
    """Tables that changed later are behind by fewer windows."""
    for number in range(len(TABLES) - 1, 2, -1):
        merge(spark, landing, landing.land([insert("2", relation_id=1000 + number)]))
    window = [landing.land([]) for _ in range(IDLE_WINDOWS)][-1]
    # The tables 0 to 2 did not change, then the last table changed first.
    assert merge(spark, landing, window) == [*TABLES[:3], *TABLES[-2:]]
