"""Runs that continue with the next windows, and the conditions that end them."""

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
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecord
from pyspark.sql import SparkSession

from pgcdc_assets.capture.snapshot import snapshot_tables
from pgcdc_assets.capture.window import CaptureReport, capture_window
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS
from pgcdc_assets.orchestration.checks.raw import COUNTED_AS_DECODED, WITHOUT_GAPS
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs import long_runs as module
from pgcdc_assets.orchestration.runs.long_runs import SECONDS_TAG, LongRun
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.wal import read_current_lsn
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.session import own_session
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify import compare_table
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

A = dg.AssetKey([NAME, "scd1", "public", "a"])
B = dg.AssetKey([NAME, "scd1", "public", "b"])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.1)
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


def land_aside(going_on: Orchestrated) -> None:
    """Land a window without Dagster: two runs in one process block each other's logging."""
    epoch = going_on.zone.epochs.latest()
    assert epoch is not None
    start = going_on.zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
    settings = going_on.database.settings()
    with query_connection(settings, "test") as conn:
        window = LsnWindow.of(epoch.epoch, start, read_current_lsn(conn))
    going_on.instance.add_dynamic_partitions(going_on.capture.windows_name, [window.key])
    capture_window(settings, going_on.zone, going_on.capture.slot, "pub", window)


def asked(going_on: Orchestrated, sensor: str) -> dg.RunRequest:
    (request,) = going_on.tick(sensor).run_requests
    assert float(request.tags[SECONDS_TAG]) == 60
    return request  # type: ignore[no-any-return]


def evaluated(result: dg.ExecuteInProcessResult, key: dg.AssetKey | None = None) -> list[str]:
    return [
        check.check_name
        for check in result.get_asset_check_evaluations()
        if key in (None, check.asset_key)
    ]


def checked(going_on: Orchestrated, key: dg.AssetKey) -> Sequence[AssetCheckExecutionRecord]:
    """Return the recorded evaluations of a table's invariants."""
    return going_on.instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(key, INVARIANTS), limit=100
    )


def materialized(result: dg.ExecuteInProcessResult, key: dg.AssetKey) -> list[str | None]:
    events = result.get_asset_materialization_events()
    return [event.partition for event in events if event.asset_key == key]


def test_a_capture_lands_what_is_committed_while_it_runs(going_on: Orchestrated) -> None:
    going_on.commit("insert into b values (0, 1)")

    def landed() -> int:
        counts = [summary.counts for summary in going_on.zone.changes.windows(1)]
        return sum(count.get("public.b", {}).get("I", 0) for count in counts)

    def has_landed(row_count: int) -> bool:
        return landed() >= row_count

    def commit_now_and_then() -> None:
        for number in range(1, 6):
            wait_until(partial(has_landed, number), f"{number} rows to land")
            going_on.commit(f"insert into b values ({number}, 1)")

    with running_beside(commit_now_and_then):
        result = going_on.execute(asked(going_on, "lag"), "capture")
    assert result.success

    windows = [LsnWindow.parse(key) for key in going_on.windows()]
    assert len(windows) >= 6
    assert [w.end for w in windows[:-1]] == [w.start for w in windows[1:]]
    assert materialized(result, going_on.raw) == [window.key for window in windows]
    assert [summary.window for summary in going_on.zone.changes.windows(1)] == windows
    assert landed() == 6
    assert sorted(set(evaluated(result))) == sorted({WITHOUT_GAPS, COUNTED_AS_DECODED})
    assert len(evaluated(result)) == 2 * len(windows)
    # All changes are landed: the sensor finds no open window, and opens no window.
    assert [r.partition_key for r in going_on.tick("lag").run_requests] in (
        [],
        going_on.windows()[len(windows) :],
    )


@pytest.mark.spark
@pytest.mark.slow
def test_a_merge_folds_what_is_landed_while_it_runs(
    going_on: Orchestrated, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[SparkSession] = []

    def counted(beside: SparkSession) -> SparkSession:
        opened.append(beside)
        return own_session(beside)

    monkeypatch.setattr("pgcdc_assets.spark.session.own_session", counted)
    going_on.commit("insert into b values (0, 1)")
    going_on.land()
    first = going_on.windows()

    def land_now_and_then() -> None:
        for number in range(1, 4):
            going_on.commit(f"insert into b values ({number}, 1)")
            land_aside(going_on)
            time.sleep(1.0)

    with running_beside(land_now_and_then):
        result = going_on.execute(asked(going_on, "merges"), "merge")
    assert result.success

    assert len(going_on.windows()) == len(first) + 3
    shown = [key for key in materialized(result, B) if key is not None]
    assert sorted(shown) == going_on.windows(), "each window once"
    assert evaluated(result).count(INVARIANTS) >= 2
    history = checked(going_on, B)
    assert len(history) == evaluated(result, B).count(INVARIANTS) >= 2, "one for each merge"
    assert {entry.run_id for entry in history} == {result.run_id}
    for entry in history:
        assert entry.event is not None
        assert abs(entry.create_timestamp - entry.event.timestamp) < 2
    assert len(checked(going_on, A)) == 1, "its copy was merged, and nothing changed in it later"
    assert len(opened) == 2 + 1, "two tables side by side and the check, once for all rounds"
    assert compare_table(going_on.database.settings(), going_on.zone, "pub", "public", "b").is_equal
    assert "every table is merged" in (going_on.tick("merges").skip_message or "")


@pytest.mark.spark
@pytest.mark.slow
def test_a_merge_leaves_a_new_table_to_a_run_of_its_own(
    going_on: Orchestrated, spark: SparkSession
) -> None:
    """A run cannot merge a table that was not selected: the sensor requests another run."""
    going_on.land()
    request = asked(going_on, "merges")
    database = going_on.database
    database.execute("create table c (id int primary key)")
    database.execute("alter publication pub add table c")
    tables = (*going_on.capture.tables, CdcTable("public", "c"))
    wider = Orchestrated(
        database, going_on.lake, going_on.instance, replace(going_on.capture, tables=tables)
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
        result = going_on.execute(request, "merge")
    assert result.success
    assert materialized(result, B) == going_on.windows()[:1]
    (again,) = wider.tick("merges").run_requests
    assert dg.AssetKey([NAME, "scd1", "public", "c"]) in (again.asset_selection or ())


def test_runs_without_the_tag_do_not_continue(
    going_on: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such runs do not look for a next window."""
    from pgcdc_assets.orchestration.assets import raw as capture_assets

    looks: list[object] = []

    def recorded(conn: Any) -> Lsn:
        looks.append(conn)
        return read_current_lsn(conn)

    monkeypatch.setattr(capture_assets, "read_current_lsn", recorded)
    (request,) = going_on.tick("lag", one_shot=True).run_requests
    assert SECONDS_TAG not in request.tags
    with running_beside(lambda: going_on.commit("insert into b values (1, 1)")):
        assert going_on.execute(request, "capture").success
    assert len(going_on.windows()) == 1
    assert looks == []


def test_a_window_that_fails_on_the_way_is_asked_for_again(
    going_on: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window's key exists and its run failed: the sensor retries the same window."""
    from pgcdc_assets.orchestration.assets import raw as capture_assets

    calls: list[object] = []

    def failing(*arguments: Any) -> CaptureReport:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return capture_window(*arguments)

    monkeypatch.setattr(capture_assets, "capture_window", failing)
    request = asked(going_on, "lag")

    def commit_a_second_later() -> None:
        time.sleep(1)
        going_on.commit("insert into b values (1, 1)")

    with running_beside(commit_a_second_later):
        assert not going_on.execute(request, "capture").success
    open_window = going_on.windows()[-1]
    assert len(going_on.windows()) == 2
    (again,) = going_on.tick("lag").run_requests
    assert again.partition_key == open_window
    assert going_on.execute(again, "capture").success
    landed = going_on.zone.changes.windows(1)
    assert [s.window.key for s in landed] == going_on.windows()[: len(landed)]


def test_a_capture_ends_when_the_server_does_not_answer(
    going_on: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opened window is landed; the sensor finds out when the server is available again."""

    def cut(conn: Any) -> Lsn:
        with query_connection(going_on.database.settings(), "killer") as killer:
            pid = conn.info.backend_pid
            killer.cursor().execute("select pg_terminate_backend(%s, 1000)", [pid])
        return read_current_lsn(conn)

    from pgcdc_assets.orchestration.assets import raw as capture_assets

    monkeypatch.setattr(capture_assets, "read_current_lsn", cut)
    assert going_on.execute(asked(going_on, "lag"), "capture").success
    assert len(going_on.windows()) == 1


def following(going_on: Orchestrated, run: dg.DagsterRun, idle_seconds: float = 5.0) -> LongRun:
    names = Names.of(going_on.capture)
    return LongRun(going_on.instance, run.run_id, names.slot_pool, 60.0, idle_seconds)


def started(going_on: Orchestrated) -> dg.DagsterRun:
    return going_on.instance.create_run_for_job(
        going_on.location.repository.get_job("t_capture"), status=dg.DagsterRunStatus.STARTED
    )


def test_a_run_that_is_over_in_the_books_ends(going_on: Orchestrated) -> None:
    """Dagster starts another run in its place: two runs must not open windows."""
    run = started(going_on)
    assert following(going_on, run).find(lambda: "more") == "more"
    going_on.instance.report_run_canceled(run)
    assert following(going_on, run).find(lambda: "more") is None


@pytest.mark.parametrize(("job", "ends"), [("t_capture", True), ("t_snapshot", False)])
def test_a_run_ends_for_another_that_waits_for_its_pool(
    going_on: Orchestrated, job: str, ends: bool
) -> None:
    run = started(going_on)
    queue(going_on, job)
    assert following(going_on, run).find(lambda: "more") == (None if ends else "more")


def test_a_run_ends_for_any_other_that_waits_for_long(
    going_on: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance with one run at a time would never merge during a capture."""
    run = started(going_on)
    queue(going_on, "t_merge")
    assert following(going_on, run).find(lambda: "more") == "more"
    monkeypatch.setattr(module, "QUEUED_SECONDS", -60.0)
    assert following(going_on, run).find(lambda: "more") is None


def queue(going_on: Orchestrated, job: str) -> None:
    """Leave a run in Dagster's queue."""
    location = RegisteredCodeLocationOrigin("tests")
    going_on.instance.create_run_for_job(
        going_on.location.repository.get_job(job),
        status=dg.DagsterRunStatus.QUEUED,
        remote_job_origin=RemoteJobOrigin(RemoteRepositoryOrigin(location, "tests"), job),
    )


def test_a_run_ends_for_a_step_that_waits_for_its_pool(going_on: Orchestrated) -> None:
    run, other = started(going_on), started(going_on)
    pool = Names.of(going_on.capture).slot_pool
    storage = going_on.instance.event_log_storage
    storage.initialize_concurrency_limit_to_default(pool)
    assert storage.claim_concurrency_slot(pool, run.run_id, "a step").is_claimed
    assert following(going_on, run).find(lambda: "more") == "more"
    assert not storage.claim_concurrency_slot(pool, other.run_id, "a step").is_claimed
    assert following(going_on, run).find(lambda: "more") is None


def test_a_run_without_anything_to_do_ends(going_on: Orchestrated) -> None:
    looks: list[float] = []
    began = time.monotonic()
    assert following(going_on, started(going_on), 0.5).find(lambda: looks.append(0)) is None
    assert 0.4 < time.monotonic() - began < 5
    assert len(looks) > 1


def test_a_stopped_run_looks_for_no_further_window(going_on: Orchestrated) -> None:
    run = following(going_on, started(going_on))
    assert run.find(lambda: run.stop()) is None
    assert run.find(lambda: "more") is None
