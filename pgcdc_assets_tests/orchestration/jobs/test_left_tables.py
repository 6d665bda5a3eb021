"""A table that left its publication, in the epochs after it and in the retention of windows."""

from __future__ import annotations

import dagster as dg
import pytest
from psycopg2 import sql
from pyspark.sql import SparkSession

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.orchestration.state import left_tables
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.settings.policies import RetentionPolicy, WindowPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated, followed_capture
from pgcdc_assets_tests.support.database import Database

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

B = TableName("public", "b")


def rows(orchestrated: Orchestrated, spark: SparkSession) -> list[int]:
    path = table_path(orchestrated.lake, NAME, *B, 1)
    return sorted(row["id"] for row in spark.read.format("delta").load(path).collect())


def loaded_again(orchestrated: Orchestrated) -> Orchestrated:
    """Load the definitions with the present list of tables."""
    return Orchestrated(
        orchestrated.database, orchestrated.lake, orchestrated.instance, orchestrated.capture
    )


@pytest.mark.sampled
def test_a_table_that_left_holds_no_windows_of_a_renewed_epoch_and_loses_no_change(
    database: Database, lake: Lake, instance: dg.DagsterInstance, spark: SparkSession
) -> None:
    for table in ("a", "b"):
        database.execute(f"create table {table} (id int primary key)")
        database.execute(f"insert into {table} values (1)")
    database.execute("create publication pub for all tables")
    windows = WindowPolicy(max_age_seconds=0, retry_seconds=0, run_seconds=0)
    capture = followed_capture(database, windows, retention=RetentionPolicy(raw_days=0))
    first = Orchestrated(database, lake, instance, capture)
    first.tick("lag")
    first = loaded_again(first)
    first.sync()
    assert rows(first, spark) == [1]

    # The last change of the table is landed, and not merged, when the table leaves.
    database.execute("insert into b values (2); insert into a values (2)")
    first.land()
    database.execute("drop table b")
    database.execute(
        sql.SQL("select pg_drop_replication_slot({})").format(sql.Literal(capture.slot))
    )
    assert renew_epoch(database.settings(), first.zone, capture.slot, "pub").epoch == 2
    database.execute("insert into a values (3)")
    first.tick("lag")
    second = loaded_again(first)
    second.sync()
    assert list(left_tables(second.zone, capture)) == [B]
    assert second.equals_source("a")
    assert rows(second, spark) == [1, 2]

    database.execute("insert into a values (4)")
    second.sync()
    upkeep = second.location.repository.get_job(f"{NAME}_upkeep")
    assert upkeep.execute_in_process(instance=instance).success
    assert second.zone.changes.windows(1) == []
    assert second.zone.changes.windows(2) == []

    # A table of its name is captured again, in the later epoch.
    database.execute("create table b (id int primary key); insert into b values (5)")
    second.tick("lag")
    third = loaded_again(second)
    third.sync()
    database.execute("insert into b values (6)")
    third.sync()
    assert left_tables(third.zone, capture) == {}
    assert rows(third, spark) == [5, 6]
    assert third.equals_source("a")


@pytest.mark.sampled
def test_a_table_that_left_before_the_snapshot_of_a_change_does_not_fail_in_the_next_epoch(
    database: Database, lake: Lake, instance: dg.DagsterInstance, spark: SparkSession
) -> None:
    """No snapshot heals the change any more, so the table ends before the change."""
    database.execute("create table a (id int primary key)")
    database.execute("create table b (id int primary key, v int); insert into b values (1, 1)")
    database.execute("create publication pub for all tables")
    windows = WindowPolicy(max_age_seconds=0, retry_seconds=0, run_seconds=0)
    first = Orchestrated(database, lake, instance, followed_capture(database, windows))
    first.tick("lag")
    first = loaded_again(first)
    first.sync()

    first.commit("insert into b values (2, 2)")
    first.commit("alter table b alter v type date using null")
    first.commit("insert into b values (3, '2024-01-01')")
    requests = first.tick("lag", one_shot=True).run_requests
    (wanted,) = [each for each in requests if each.job_name == f"{NAME}_capture"]
    assert first.execute(wanted, "capture").success
    first.commit("drop table b")
    database.execute("select pg_drop_replication_slot(%s)", (first.capture.slot,))
    assert renew_epoch(database.settings(), first.zone, first.capture.slot, "pub").epoch == 2
    first.commit("insert into a values (3)")
    first.tick("lag")
    second = loaded_again(first)
    for _ in range(2):
        second.sync()
        assert rows(second, spark) == [1, 2]
    assert list(left_tables(second.zone, second.capture)) == [B]
    assert second.equals_source("a")
    assert second.tick("merges").run_requests == []
