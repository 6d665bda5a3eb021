"""Runs that continue with further windows, and the conditions that end the runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecord
from pyspark.sql import SparkSession

from pgcdc_assets.capture import session as session_module
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.capture.snapshot import snapshot_tables
from pgcdc_assets.capture.window import CaptureReport, capture_window
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.orchestration.assets import merge_reports
from pgcdc_assets.orchestration.assets.merge_rounds import MergeRounds
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS
from pgcdc_assets.orchestration.checks.raw import WINDOW_CHECKS
from pgcdc_assets.orchestration.metadata import THROUGH_METADATA
from pgcdc_assets.orchestration.runs import long_runs as module
from pgcdc_assets.orchestration.runs.long_runs import SECONDS_TAG
from pgcdc_assets.policies import StreamPolicy
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.wal import read_current_lsn
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.session import own_session
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import read_scd_state, table_path
from pgcdc_assets.verify import compare_table
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

A = dg.AssetKey([NAME, "scd1", "public", "a"])
B = dg.AssetKey([NAME, "scd1", "public", "b"])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 4.0)


@contextmanager
def running_beside(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a thread beside the block, and raise its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not errors, errors


def land_aside(continuing: Orchestrated) -> None:
    """Land a window without Dagster, because two runs in one process block each other's log."""
    epoch = continuing.zone.epochs.latest()
    assert epoch is not None
    start = continuing.zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
    settings = continuing.database.settings()
    with query_connection(settings, "test") as conn:
        window = LsnWindow.of(epoch.epoch, start, read_current_lsn(conn))
    continuing.instance.add_dynamic_partitions(continuing.capture.windows_name, [window.key])
    capture_window(settings, continuing.zone, continuing.capture.slot, "pub", window)


def asked(continuing: Orchestrated, sensor: str) -> dg.RunRequest:
    (request,) = continuing.tick(sensor).run_requests
    assert float(request.tags[SECONDS_TAG]) == 60
    return request  # type: ignore[no-any-return]


def evaluated(result: dg.ExecuteInProcessResult, key: dg.AssetKey | None = None) -> list[str]:
    return [
        check.check_name
        for check in result.get_asset_check_evaluations()
        if key in (None, check.asset_key)
    ]


def checked(continuing: Orchestrated, key: dg.AssetKey) -> Sequence[AssetCheckExecutionRecord]:
    """Return the recorded evaluations of a table's invariants."""
    return continuing.instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(key, INVARIANTS), limit=100
    )


def materialized(result: dg.ExecuteInProcessResult, key: dg.AssetKey) -> list[str | None]:
    events = result.get_asset_materialization_events()
    return [event.partition for event in events if event.asset_key == key]


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
    """A12: without changes there is one window each `max_empty_seconds`, and a change is landed."""
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


@pytest.mark.spark
@pytest.mark.parametrize(("most_seconds", "reports"), [(60.0, 1), (0.0, 3)])
def test_while_windows_wait_merges_are_reported_together(
    continuing: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    most_seconds: float,
    reports: int,
) -> None:
    """Each table is reported once in `MOST_SECONDS`, and at the end of the run."""
    monkeypatch.setattr(MergeRounds, "has_landed", lambda _: True)
    monkeypatch.setattr(merge_reports, "MOST_SECONDS", most_seconds)
    path = table_path(continuing.lake, NAME, "public", "b", 1)

    def is_merged(window: LsnWindow) -> bool:
        state = read_scd_state(continuing.lake, NAME, path)
        return state is not None and state.watermark == window.end_position

    continuing.land()

    def land_and_wait() -> None:
        for number in range(1, 4):
            wait_until(partial(is_merged, LsnWindow.parse(continuing.windows()[-1])), "a merge")
            continuing.commit(f"insert into b values ({number}, 1)")
            land_aside(continuing)

    with running_beside(land_and_wait):
        result = continuing.execute(asked(continuing, "merges"), "merge")
    assert result.success

    assert evaluated(result, B).count(INVARIANTS) == 1 + reports
    events = [e for e in result.get_asset_materialization_events() if e.asset_key == B]
    assert [event.partition for event in events] == continuing.windows()
    figures = [e.materialization.metadata for e in events if "steps" in e.materialization.metadata]
    assert len(figures) == 1 + reports
    assert sum(float(str(each["rows_inserted"].value)) for each in figures[1:]) == 3
    shown = [str(e.materialization.metadata[THROUGH_METADATA].value) for e in events]
    first, *later = continuing.windows()
    assert shown == [first, *(later if reports == 3 else later[-1:] * 3)]
    assert "every table is merged" in (continuing.tick("merges").skip_message or "")


@pytest.mark.spark
def test_merges_of_a_run_that_dies_before_its_report_are_reported_by_the_next_run(
    continuing: Orchestrated, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    continuing.land()
    request = asked(continuing, "merges")

    def land_one() -> None:
        wait_until(lambda: bool(continuing.instance.get_materialized_partitions(B)), "a merge")
        continuing.commit("insert into b values (1, 1)")
        land_aside(continuing)

    with monkeypatch.context() as patched, running_beside(land_one):

        def die(*_: object) -> Iterator[object]:
            raise RuntimeError("planted")

        patched.setattr(merge_reports.MergeReports, "yield_kept", die)
        assert not continuing.execute(request, "merge").success
    merged, _ = continuing.windows()
    assert continuing.instance.get_materialized_partitions(B) == {merged}
    assert compare_table(
        continuing.database.settings(), continuing.zone, "pub", "public", "b"
    ).is_equal, "the merge was committed"

    continuing.commit("insert into a values (77, 'x')")
    land_aside(continuing)
    (again,) = continuing.tick("merges").run_requests
    result = continuing.execute(again, "merge")
    assert result.success
    newest = continuing.instance.get_latest_materialization_event(B)
    assert newest is not None and newest.asset_materialization is not None
    assert newest.asset_materialization.partition == continuing.windows()[-1]
    version = (newest.asset_materialization.tags or {})["dagster/data_version"]
    assert version, "the table counts as changed, though the second run has not changed it"


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
