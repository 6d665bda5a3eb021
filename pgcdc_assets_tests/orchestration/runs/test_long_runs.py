"""Runs that continue with further windows, and the conditions that end the runs."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run
from pyspark.sql import SparkSession

from pgcdc_assets.capture import session as session_module
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import CaptureReport
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS
from pgcdc_assets.orchestration.checks.raw import WINDOW_CHECKS
from pgcdc_assets.orchestration.runs import long_runs as module
from pgcdc_assets.orchestration.runs.long_runs import SECONDS_TAG
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.slots.status import read_slot_status
from pgcdc_assets.postgres.wal.positions import read_current_lsn
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import HeartbeatPolicy, StreamPolicy
from pgcdc_assets.spark.session import own_session
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify import compare_table
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.database import create_database, drop_database
from pgcdc_assets_tests.support.orchestration.long_runs import (
    asked,
    checked,
    evaluated,
    land_aside,
    materialized,
    running_beside,
)
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

A = dg.AssetKey([NAME, "scd1", "public", "a"])
B = dg.AssetKey([NAME, "scd1", "public", "b"])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 4.0)


@pytest.mark.sampled
def test_a_capture_lands_changes_that_are_committed_during_its_run(
    continuing: Orchestrated,
) -> None:
    continuing.commit("insert into b values (0, 1)")

    def landed() -> int:
        counts = [summary.counts for summary in continuing.zone.changes.windows(1)]
        return sum(count.get("public.b", {}).get("I", 0) for count in counts)

    def has_landed(row_count: int) -> bool:
        return landed() >= row_count

    def commit_now_and_then() -> None:
        for number in range(1, 6):
            wait_until(partial(has_landed, number), f"{number} rows to land")
            continuing.commit(f"insert into b values ({number}, 1)")

    with running_beside(commit_now_and_then):
        result = continuing.execute(asked(continuing, "lag"), "capture")
    assert result.success

    windows = [LsnWindow.parse(key) for key in continuing.windows()]
    assert len(windows) >= 6
    assert [w.end for w in windows[:-1]] == [w.start for w in windows[1:]]
    assert materialized(result, continuing.raw) == [window.key for window in windows]
    assert [summary.window for summary in continuing.zone.changes.windows(1)] == windows
    assert landed() == 6
    assert sorted(set(evaluated(result))) == sorted(WINDOW_CHECKS)
    assert len(evaluated(result)) == len(WINDOW_CHECKS) * len(windows)
    # All changes are landed. The sensor finds no open window, and opens no window.
    assert [r.partition_key for r in continuing.tick("lag").run_requests] in (
        [],
        continuing.windows()[len(windows) :],
    )


@pytest.mark.sampled
def test_a_busy_server_opens_windows_for_changes_only(continuing: Orchestrated) -> None:
    """Writes to another table open no window before `max_empty_seconds`, and a change opens one."""
    windows = replace(continuing.capture.windows, max_empty_seconds=1000, run_seconds=20)
    location = Orchestrated(
        continuing.database,
        continuing.lake,
        continuing.instance,
        replace(continuing.capture, windows=windows),
    )
    location.commit("create table other (id int); insert into b values (0, 1)")

    def landed() -> list[LsnWindow]:
        return [summary.window for summary in location.zone.changes.windows(1)]

    def work_elsewhere() -> None:
        wait_until(lambda: bool(landed()), "the first window")
        for number in range(1, 4):
            for _ in range(15):
                location.commit("insert into other values (1)")
                time.sleep(0.05)
            before = len(landed())
            location.commit(f"insert into b values ({number}, 1)")
            wait_until(lambda before=before: len(landed()) > before, "the change")  # type: ignore[misc]

    (request,) = location.tick("lag").run_requests
    with running_beside(work_elsewhere):
        assert location.execute(request, "capture").success
    summaries = location.zone.changes.windows(1)
    assert sum(summary.count_changes([TableName("public", "b")]) for summary in summaries) == 4
    assert 4 <= len(summaries) <= 5


@pytest.mark.sampled
def test_a_long_run_frees_the_wal_of_a_busy_other_database(
    continuing: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12: with heartbeats, there is one window each `max_empty_seconds`."""
    monkeypatch.setattr(module, "HANDOVER_SECONDS", 0.0)
    windows = replace(continuing.capture.windows, max_empty_seconds=1, run_seconds=6)
    location = Orchestrated(
        continuing.database,
        continuing.lake,
        continuing.instance,
        replace(continuing.capture, windows=windows, heartbeat=HeartbeatPolicy(seconds=1)),
    )
    other = create_database(location.database.server)
    kept: list[tuple[list[LsnWindow], Lsn]] = []

    def landed() -> list[LsnWindow]:
        return [summary.window for summary in location.zone.changes.windows(1)]

    def work_elsewhere() -> None:
        wait_until(lambda: bool(landed()), "the first window")
        began = time.monotonic()
        while time.monotonic() < began + 4:
            other.execute("insert into busy select generate_series(1, 10000)")
            # A checkpoint logs the running transactions, which lets `restart_lsn` move.
            other.execute("checkpoint")
            known = landed()
            with query_connection(location.database.settings(), "test") as conn:
                status = read_slot_status(conn, location.capture.slot)
            assert status is not None and status.restart_lsn is not None
            kept.append((known, status.restart_lsn))
            time.sleep(0.1)

    try:
        other.execute("create table busy (id int)")
        (request,) = location.tick("lag").run_requests
        with running_beside(work_elsewhere):
            assert location.execute(request, "capture").success
    finally:
        drop_database(other)
    summaries = location.zone.changes.windows(1)
    assert 4 <= len(summaries) <= 8
    heartbeats = [summary.counts.get("(messages)", {}).get("M", 0) for summary in summaries]
    assert sum(heartbeats) >= 3
    assert all(summary.counts.keys() <= {"(messages)"} for summary in summaries)
    # The newest window may not be confirmed yet, and a window has a checkpoint or more.
    later = [(known[-3].start, restart) for known, restart in kept if len(known) >= 3]
    assert later and all(restart >= start for start, restart in later)
    written = summaries[-1].window.end - summaries[0].window.start
    assert written > 5_000_000


@pytest.mark.sampled
@pytest.mark.spark
@pytest.mark.slow
def test_a_merge_folds_windows_that_are_landed_during_its_run(
    continuing: Orchestrated, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[SparkSession] = []

    def counted(beside: SparkSession) -> SparkSession:
        opened.append(beside)
        return own_session(beside)

    monkeypatch.setattr("pgcdc_assets.spark.session.own_session", counted)
    continuing.commit("insert into b values (0, 1)")
    continuing.land()
    first = continuing.windows()

    def land_now_and_then() -> None:
        # Windows that wait delay the report of the first merge, and both have one report.
        wait_until(lambda: bool(checked(continuing, B)), "the report of the first merge")
        for number in range(1, 4):
            continuing.commit(f"insert into b values ({number}, 1)")
            land_aside(continuing)
            time.sleep(1.0)

    with running_beside(land_now_and_then):
        result = continuing.execute(asked(continuing, "merges"), "merge")
    assert result.success

    assert len(continuing.windows()) == len(first) + 3
    shown = [key for key in materialized(result, B) if key is not None]
    assert sorted(shown) == continuing.windows(), "each window once"
    for event in result.get_asset_materialization_events():
        found = event.materialization.metadata
        is_newest = "windows_folded" in found or event.partition in first
        assert ("dagster/column_schema" in found) == is_newest, "the largest part of a record"
    assert evaluated(result).count(INVARIANTS) >= 2
    history = checked(continuing, B)
    assert len(history) == evaluated(result, B).count(INVARIANTS) >= 2, "one for each merge"
    assert {entry.run_id for entry in history} == {result.run_id}
    for entry in history:
        assert entry.event is not None
        assert abs(entry.create_timestamp - entry.event.timestamp) < 2
    assert len(checked(continuing, A)) == 1, "only the merge of the snapshot changed the table"
    assert len(opened) == 2 + 1, "two parallel tables and the check share sessions in all rounds"
    assert compare_table(
        continuing.database.settings(), continuing.zone, "pub", "public", "b"
    ).is_equal
    assert "every table is merged" in (continuing.tick("merges").skip_message or "")


@pytest.mark.soak
@pytest.mark.spark
def test_a_new_table_is_merged_by_another_run(
    continuing: Orchestrated, spark: SparkSession
) -> None:
    """A run cannot merge a table that was not selected, so the sensor requests another run."""
    continuing.land()
    request = asked(continuing, "merges")
    database = continuing.database
    database.execute("create table c (id int primary key)")
    database.execute("alter publication pub add table c")
    tables = (*continuing.capture.tables, CdcTable("public", "c"))
    wider = Orchestrated(
        database, continuing.lake, continuing.instance, replace(continuing.capture, tables=tables)
    )

    def copy_and_land() -> None:
        while not wider.instance.get_materialized_partitions(B):
            time.sleep(0.1)
        snapshot_tables(
            database.settings(), wider.zone, wider.capture.slot, "pub", [TableName("public", "c")]
        )
        wider.commit("insert into c values (1)")
        wider.commit("insert into b values (1, 1)")
        land_aside(wider)

    with running_beside(copy_and_land):
        result = continuing.execute(request, "merge")
    assert result.success
    assert materialized(result, B) == continuing.windows()[:1]
    (again,) = wider.tick("merges").run_requests
    assert dg.AssetKey([NAME, "scd1", "public", "c"]) in (again.asset_selection or ())


@pytest.mark.sampled
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("ends", ["before the run", "during the run", "without a snapshot"])
def test_a_table_with_a_resnapshot_is_merged_by_another_run_after_its_end(
    continuing: Orchestrated, spark: SparkSession, ends: str
) -> None:
    """C12: the sensor leaves the table out while its re-snapshot runs."""
    continuing.land()
    assert continuing.execute(asked(continuing, "merges"), "merge").success
    resnapshot = continuing.start_run("snapshot", {"dagster/partition": "public.a"})
    continuing.commit("insert into a values (50, 'x')")
    continuing.commit("insert into b values (50, 1)")
    continuing.land()
    merged = set(continuing.instance.get_materialized_partitions(B))
    request = asked(continuing, "merges")
    assert list(request.asset_selection or ()) == [B]

    def end_resnapshot() -> None:
        if ends == "during the run":
            settings, slot = continuing.database.settings(), continuing.capture.slot
            snapshot_tables(settings, continuing.zone, slot, "pub", [TableName("public", "a")])
        continuing.instance.report_run_canceled(resnapshot)

    def land_more() -> None:
        wait_until(
            lambda: set(continuing.instance.get_materialized_partitions(B)) > merged, "a merge"
        )
        if ends != "before the run":
            end_resnapshot()
        continuing.commit("insert into b values (51, 1)")
        land_aside(continuing)

    if ends == "before the run":
        end_resnapshot()
    with running_beside(land_more):
        result = continuing.execute(request, "merge")
    assert result.success
    assert materialized(result, B) == continuing.windows()[1:2]
    (again,) = continuing.tick("merges").run_requests
    assert set(again.asset_selection or ()) == {A, B}


@pytest.mark.sampled
def test_runs_without_the_tag_do_not_continue(
    continuing: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These runs do not look for a further window."""
    looks: list[object] = []

    def recorded(conn: Any) -> Lsn:
        looks.append(conn)
        return read_current_lsn(conn)

    monkeypatch.setattr(session_module, "read_current_lsn", recorded)
    (request,) = continuing.tick("lag", one_shot=True).run_requests
    assert SECONDS_TAG not in request.tags
    with running_beside(lambda: continuing.commit("insert into b values (1, 1)")):
        assert continuing.execute(request, "capture").success
    assert len(continuing.windows()) == 1
    assert looks == []


@pytest.mark.sampled
def test_a_run_that_a_person_executes_again_does_not_continue(continuing: Orchestrated) -> None:
    """Dagster copies the tag. The other tables would wait if some were merged again."""
    request = asked(continuing, "lag")
    run = continuing.create_run("capture", request.tags, repeats="of a deleted run")
    job = continuing.location.repository.get_job(f"{NAME}_capture")
    with running_beside(lambda: continuing.commit("insert into b values (1, 1)")):
        assert execute_run(InMemoryJob(job), run, continuing.instance).success
    assert len(continuing.windows()) == 1


@pytest.mark.sampled
def test_a_window_that_fails_in_a_long_run_is_requested_again(
    continuing: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window's key exists and its run failed, so the sensor retries the same window."""
    calls: list[object] = []
    land = CaptureSession.land

    def failing(session: CaptureSession, window: LsnWindow) -> CaptureReport:
        calls.append(window)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return land(session, window)

    monkeypatch.setattr(CaptureSession, "land", failing)
    request = asked(continuing, "lag")

    def commit_a_second_later() -> None:
        time.sleep(1)
        continuing.commit("insert into b values (1, 1)")

    with running_beside(commit_a_second_later):
        assert not continuing.execute(request, "capture").success
    open_window = continuing.windows()[-1]
    assert len(continuing.windows()) == 2
    (again,) = continuing.tick("lag").run_requests
    assert again.partition_key == open_window
    assert continuing.execute(again, "capture").success
    landed = continuing.zone.changes.windows(1)
    assert [s.window.key for s in landed] == continuing.windows()[: len(landed)]


@pytest.mark.sampled
def test_a_capture_ends_when_the_server_does_not_answer(
    continuing: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open window is landed, and the sensor continues when the server is available again."""

    def cut(conn: Any) -> Lsn:
        with query_connection(continuing.database.settings(), "killer") as killer:
            pid = conn.info.backend_pid
            killer.cursor().execute("select pg_terminate_backend(%s, 1000)", [pid])
        return read_current_lsn(conn)

    monkeypatch.setattr(session_module, "read_current_lsn", cut)
    capture = replace(continuing.capture, stream=StreamPolicy(resume_seconds=1))
    short = Orchestrated(continuing.database, continuing.lake, continuing.instance, capture)
    assert short.execute(asked(short, "lag"), "capture").success
    assert len(continuing.windows()) == 1
