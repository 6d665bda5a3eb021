"""`sync_capture` from an empty lake, with a real server, Dagster instance and Spark session."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.errors import PgcdcError, SlotMissing
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


def scd(table: str) -> dg.AssetKey:
    return dg.AssetKey([NAME, "scd1", "public", table])


def materialized(orchestrated: Orchestrated, key: dg.AssetKey) -> set[str]:
    return set(orchestrated.instance.get_materialized_partitions(key))


def checked(run: dg.DagsterRun, orchestrated: Orchestrated) -> set[str]:
    """Return the checks that a run has evaluated."""
    kinds = {dg.DagsterEventType.ASSET_CHECK_EVALUATION}
    records = orchestrated.instance.get_records_for_run(run.run_id, of_type=kinds).records
    found = [record.event_log_entry.asset_check_evaluation for record in records]
    return {evaluation.check_name for evaluation in found if evaluation is not None}


@pytest.mark.sampled
def test_a_sync_merges_all_earlier_commits_and_dagster_shows_them(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    database = orchestrated.database
    first = orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")
    assert first.merge_count == 1

    database.execute("insert into b select n, n / 4.0 from generate_series(1, 50) n")
    database.execute("update a set v = v || '!' where id % 2 = 0")
    database.execute("update a set id = id + 100 where id = 1")
    database.execute("delete from a where id = 2")
    second = orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")
    assert second.change_count == 50 + 5 + 1 + 1
    assert set(second.seconds) >= {"sensors", "capture", "session", "merge"}

    merges = orchestrated.instance.get_runs(filters=dg.RunsFilter(job_name=f"{NAME}_merge"))
    ranges = [run.tags["dagster/asset_partition_range_start"] for run in merges]
    assert sorted(ranges) == orchestrated.windows(), "each window is merged once"

    windows = set(orchestrated.windows())
    assert materialized(orchestrated, orchestrated.raw) == windows
    assert materialized(orchestrated, scd("a")) == windows
    assert materialized(orchestrated, dg.AssetKey([NAME, "snapshot"])) == {"public.a", "public.b"}
    assert checked(merges[0], orchestrated) == {INVARIANTS}, "checks of whole tables do not run"
    assert all(run.is_success for run in orchestrated.instance.get_runs())

    event = orchestrated.instance.get_latest_materialization_event(scd("a"))
    assert event is not None
    assert event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    assert metadata["dagster/row_count"].value == 9
    schema = metadata["dagster/column_schema"].value
    assert isinstance(schema, dg.TableSchema)
    assert [column.name for column in schema.columns][:2] == ["id", "v"]
    lineage = metadata["dagster/column_lineage"].value
    assert isinstance(lineage, dg.TableColumnLineage)
    assert lineage.deps_by_column["v"][0].asset_key == dg.AssetKey([NAME, "source", "public", "a"])


@pytest.mark.sampled
def test_a_second_sync_without_changes_merges_nothing(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    orchestrated.sync()
    assert orchestrated.sync().merge_count == 0


@pytest.mark.sampled
def test_a_window_materialised_again_is_verified_and_changes_nothing(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """H1, through Dagster: a repeated partition of raw and of a table."""
    orchestrated.database.execute("insert into b values (1, 1)")
    orchestrated.sync()
    rows = orchestrated.zone.changes.table.load()
    assert rows is not None
    (key,) = orchestrated.windows()
    repository = orchestrated.location.repository
    for job in ("capture", "merge"):
        result = repository.get_job(f"{NAME}_{job}").execute_in_process(
            instance=orchestrated.instance, partition_key=key
        )
        assert result.success
        if job == "capture":
            (event,) = result.get_asset_materialization_events()
            assert event.materialization.metadata["already_captured"].value is True
    again = orchestrated.zone.changes.table.load()
    assert again is not None
    assert again.version() == rows.version()
    assert orchestrated.equals_source("b")


@pytest.mark.sampled
def test_a_window_with_missing_rows_fails_its_run_and_its_check(
    orchestrated: Orchestrated,
) -> None:
    orchestrated.copy()
    orchestrated.commit("insert into b select n, n from generate_series(1, 3) n")
    orchestrated.land()
    table = orchestrated.zone.changes.table.load()
    assert table is not None
    table.delete("ordinal = 1")
    (key,) = orchestrated.windows()
    result = orchestrated.location.repository.get_job(f"{NAME}_capture").execute_in_process(
        instance=orchestrated.instance, partition_key=key, raise_on_error=False
    )
    assert not result.success
    (check,) = result.get_asset_check_evaluations()
    assert (check.check_name, check.passed) == ("rows_as_decoded", False)
    found = re.search(r"holds (\d+) of the (\d+) landed rows", str(check.metadata["reason"].value))
    assert found is not None
    assert int(found[2]) - int(found[1]) == 1


@pytest.mark.sampled
def test_a_broken_table_fails_alone_and_is_merged_later(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """H8: the good table continues, and the broken table catches up from raw after a correction."""
    orchestrated.sync()
    log = Path(orchestrated.lake.path(NAME, "scd1", "public", "b", "_delta_log"))
    commit = min(log.glob("*.json"))
    whole = commit.read_bytes()
    commit.write_bytes(b"not a commit")
    orchestrated.database.execute("insert into a values (50, 'new')")
    orchestrated.database.execute("insert into b values (50, 1)")
    with pytest.raises(PgcdcError, match=r"Not merged: public\.b"):
        orchestrated.sync()
    assert orchestrated.equals_source("a")
    (run, *_) = orchestrated.instance.get_runs(filters=dg.RunsFilter(job_name=f"{NAME}_merge"))
    assert run.status == dg.DagsterRunStatus.FAILURE

    commit.write_bytes(whole)
    orchestrated.sync()
    assert orchestrated.equals_source("b")


@pytest.mark.soak
def test_a_sync_after_a_renewal_continues_in_the_next_epoch(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """A10 through Dagster: the first sync has snapshots, windows and merges of epoch 2."""
    kept = (
        CdcTable("public", "a", (1, 2)),
        CdcTable("public", "b", soft_deletes=True),
    )
    orchestrated = replace(orchestrated, capture=replace(orchestrated.capture, tables=kept))
    database, zone, slot = orchestrated.database, orchestrated.zone, orchestrated.capture.slot
    orchestrated.sync()
    database.execute("insert into a values (60, 'landed')")
    orchestrated.sync()
    before = set(orchestrated.windows())
    database.execute("select pg_drop_replication_slot(%s)", (slot,))
    database.execute("delete from a where id = 60; insert into b values (60, 1)")
    with pytest.raises(SlotMissing, match="pgcdc renew"):
        orchestrated.sync()

    assert renew_epoch(database.settings(), zone, slot, "pub").epoch == 2
    # WAL between the barrier, which is the end of the first window, and the snapshots.
    database.execute("select pg_logical_emit_message(true, 'test', 'after the new slot')")
    first_merge = orchestrated.sync()
    assert first_merge.merge_count >= 1
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")
    assert orchestrated.tick("merges").skip_message == (
        "every table is merged through the newest window"
    )
    database.execute("update a set v = 'in epoch 2'; delete from b where id = 60")
    orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")
    later = set(orchestrated.windows()) - before
    assert {LsnWindow.parse(key).epoch for key in before} == {1}
    assert {LsnWindow.parse(key).epoch for key in later} == {2}
    assert materialized(orchestrated, scd("a")) >= later


def test_a_source_that_is_not_ready_ends_with_its_error(orchestrated: Orchestrated) -> None:
    orchestrated.database.execute("drop publication pub")
    with pytest.raises(PgcdcError, match="pub") as caught:
        orchestrated.sync()
    assert caught.value.exit_status == 2


@pytest.mark.sampled
def test_a_sync_ends_while_writers_continue(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """A16: the sync ends at the barrier of its start, with all earlier commits."""
    orchestrated.sync()
    stop = threading.Event()

    def write() -> None:
        number = 1000
        while not stop.is_set():
            orchestrated.database.execute(f"insert into a values ({number}, 'later')")
            number += 1

    orchestrated.database.execute("insert into b values (7, 7)")
    writer = threading.Thread(target=write)
    writer.start()
    try:
        report = orchestrated.sync()
    finally:
        stop.set()
        writer.join()
    assert report.window_count == 1
    assert orchestrated.equals_source("b")
