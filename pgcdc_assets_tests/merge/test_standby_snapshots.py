"""Tables whose snapshots come from a standby equal their sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg2 import sql

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import TransientError
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.convergence.history_audit import (
    AUDIT,
    HistoryDifference,
    audit_table,
    compare_history,
)
from pgcdc_assets_tests.support.handover import writers
from pgcdc_assets_tests.support.standby import Source, recovery_conflicts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgcdc_assets.raw.zone import RawZone

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

# Most updates of `t` do not change `v`, which is stored out of line.
TABLES = """
create table t (id int primary key, n int, v text);
create table bag (id int, n int);
alter table t alter v set storage external;
alter table bag replica identity full;
insert into t select i, 0, repeat(md5(i::text), 80) from generate_series(1, 200) i;
insert into bag select i % 9, 0 from generate_series(1, 200) i;
create publication pub for table t, bag
"""

STATEMENTS = (
    "insert into t select %s, 1, repeat(md5(random()::text), 80) on conflict do nothing",
    "update t set n = n + 1 where id = %s",
    "update t set v = repeat(md5(random()::text), 80) where id = %s",
    "update t set id = -id where id = %s and not exists (select from t x where x.id = -t.id)",
    "delete from t where id = %s",
    "insert into bag values (%s %% 9, 1)",
    "update bag set n = n + 1 where ctid = (select ctid from bag where id = %s %% 9 limit 1)",
    "delete from bag where ctid = (select ctid from bag where id = %s %% 9 limit 1)",
)

T, BAG = TableName("public", "t"), TableName("public", "bag")


@pytest.mark.soak
@pytest.mark.every_pg
def test_tables_equal_the_source_after_copies_of_a_standby_with_conflicts(
    source: Source,
    zone: RawZone,
    spark: SparkSession,
    seed: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C1, C3: a bag would count a row twice that is in the snapshot and in the stream."""
    from pgcdc_assets_tests.support.merge.pipeline import Pipeline

    pipeline = Pipeline(source.primary, zone, spark, ("t", "bag"))
    source.primary.execute(TABLES)
    with source.primary.connect() as conn, conn.cursor() as cursor:
        cursor.execute(AUDIT)
        audit_table(cursor, sql.Identifier("public", "t"), "t")
    targets = CdcTable(*T, scd=(1, 2)), CdcTable(*BAG)

    def copy(tables: list[TableName] | None) -> bool:
        try:
            snapshot_tables(
                source.primary.settings(),
                zone,
                pipeline.slot,
                "pub",
                tables,
                policy=SnapshotPolicy(parallelism=3, range_bytes=8192),
                standby=source.standby.settings(),
            )
        except TransientError:
            return False
        return True

    failed = 0
    with (
        writers(source.primary, 2, seed, STATEMENTS, key_count=200),
        recovery_conflicts(source.primary, "t", "bag"),
    ):
        while not copy(None):
            pass
        for delay in ("0", "0", "100ms", "-1"):
            with source.standby_setting("max_standby_streaming_delay", delay):
                failed += not copy([T, BAG])
            pipeline.capture()
            reports = pipeline.merge(None, *targets)
            assert all(isinstance(report, MergeReport) for report in reports.values()), reports
    pipeline.capture()
    reports = pipeline.merge(None, *targets)
    assert all(isinstance(report, MergeReport) for report in reports.values()), reports
    pipeline.assert_equal("t", "bag")
    assert compare_history(spark, source.primary, zone, T) == HistoryDifference([], [])
    assert "was ended by a conflict" in caplog.text or failed
    assert failed < 4
