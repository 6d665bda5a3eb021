"""Runs at the end of their time, and the successors that the sensors request."""

from __future__ import annotations

from functools import partial

import dagster as dg
import pytest

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.assets import merge_reports
from pgcdc_assets.orchestration.assets.merge_reports import MergeReports
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs import long_runs as module
from pgcdc_assets.orchestration.runs.long_runs import SECONDS_TAG, LongRun, hands_over
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.orchestration.sensors.test_lag import merged_through
from pgcdc_assets_tests.support.orchestration.long_runs import (
    asked,
    land_aside,
    materialized,
    running_beside,
)
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

A, B = (dg.AssetKey([NAME, "scd1", "public", table]) for table in "ab")
OVERDUE = {SECONDS_TAG: "0.001"}
LONG = {SECONDS_TAG: "600"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 2.0)


@pytest.mark.sampled
def test_a_capture_at_the_end_of_its_time_gets_one_successor(continuing: Orchestrated) -> None:
    continuing.land()
    newest = continuing.windows()[-1]
    running = continuing.start_run("capture", OVERDUE)
    (request,) = continuing.tick("lag").run_requests
    assert request.partition_key == newest, "a landed window, which cannot overlap another one"
    assert float(request.tags[SECONDS_TAG]) == 60
    assert continuing.windows()[-1] == newest
    (repeated,) = continuing.tick("lag").run_requests
    assert repeated.run_key == request.run_key, "Dagster skips a repeated key"
    assert running.run_id in request.run_key
    continuing.create_run("capture", request.tags)
    assert continuing.tick("lag").run_requests == []


@pytest.mark.sampled
def test_a_merge_at_the_end_of_its_time_gets_one_successor(continuing: Orchestrated) -> None:
    continuing.land()
    continuing.start_run("merge", OVERDUE)
    (request,) = continuing.tick("merges").run_requests
    assert set(request.asset_selection) == {A, B}
    continuing.create_run("merge", request.tags)
    assert continuing.tick("merges").run_requests == []


@pytest.mark.sampled
def test_a_merge_whose_tables_are_all_copied_gets_no_successor(continuing: Orchestrated) -> None:
    """Dagster takes an empty selection for all tables."""
    continuing.land()
    landed = LsnWindow.parse(continuing.windows()[-1])
    for table in ("a", "b"):
        merged_through(continuing, table, landed.end)
    continuing.start_run("merge", OVERDUE)
    snapshot = continuing.start_run("snapshot", {})
    assert not continuing.tick("merges").run_requests
    continuing.instance.report_run_canceled(snapshot)
    (request,) = continuing.tick("merges").run_requests
    assert set(request.asset_selection) == {A, B}


@pytest.mark.sampled
@pytest.mark.parametrize("sensor", ["lag", "merges"])
@pytest.mark.parametrize("tags", [LONG, {}], ids=["within its time", "not continuing"])
def test_other_runs_get_no_successor(
    continuing: Orchestrated, sensor: str, tags: dict[str, str]
) -> None:
    continuing.land()
    continuing.start_run({"lag": "capture", "merges": "merge"}[sensor], tags)
    assert not continuing.tick(sensor).run_requests


@pytest.mark.sampled
@pytest.mark.parametrize("sensor", ["lag", "merges"])
def test_without_a_buffer_there_is_no_successor(
    continuing: Orchestrated, unbuffered: dg.DagsterInstance, sensor: str
) -> None:
    """Such a run would be queued until the pool is free."""
    continuing.land()
    keys = continuing.windows()
    continuing.instance = unbuffered
    unbuffered.add_dynamic_partitions(continuing.capture.windows_name, keys)
    continuing.start_run({"lag": "capture", "merges": "merge"}[sensor], OVERDUE)
    assert not continuing.tick(sensor).run_requests


@pytest.mark.sampled
@pytest.mark.parametrize(("limit", "hands"), [(1, True), (2, False)])
def test_a_pool_that_admits_two_runs_has_no_successors(
    continuing: Orchestrated, limit: int, hands: bool
) -> None:
    pool = Names.of(continuing.capture).slot_pool
    continuing.instance.event_log_storage.set_concurrency_slots(pool, limit)
    assert hands_over(continuing.instance, pool) is hands


def test_a_one_shot_run_requests_no_successor(continuing: Orchestrated) -> None:
    continuing.land()
    continuing.start_run("capture", OVERDUE)
    assert continuing.tick("lag", one_shot=True).run_requests == []
    continuing.start_run("merge", OVERDUE)
    assert not continuing.tick("merges", one_shot=True).run_requests


@pytest.mark.sampled
def test_the_successor_of_a_capture_continues_behind_the_windows_landed_meanwhile(
    continuing: Orchestrated,
) -> None:
    continuing.commit("insert into b values (0, 1)")
    continuing.land()
    running = continuing.start_run("capture", OVERDUE)
    (request,) = continuing.tick("lag").run_requests
    for number in (1, 2):
        continuing.commit(f"insert into b values ({number}, 1)")
        land_aside(continuing)
    before = continuing.windows()
    continuing.instance.report_run_canceled(running)

    def landed() -> int:
        summaries = continuing.zone.changes.windows(1)
        return sum(summary.count_changes([TableName("public", "b")]) for summary in summaries)

    def commit_more() -> None:
        assert landed() == 3
        continuing.commit("insert into b values (3, 1)")
        wait_until(partial(_is, landed, 4), "the change after the hand-over")

    with running_beside(commit_more):
        result = continuing.execute(request, "capture")
    assert result.success
    windows = [LsnWindow.parse(key) for key in continuing.windows()]
    assert len(windows) > len(before)
    assert [w.end for w in windows[:-1]] == [w.start for w in windows[1:]]
    assert [summary.window for summary in continuing.zone.changes.windows(1)] == windows
    shown = materialized(result, continuing.raw)
    assert shown == [window.key for window in windows], "the killed run has recorded one window"
    assert before[0] == shown[0]


@pytest.mark.sampled
@pytest.mark.spark
@pytest.mark.slow
def test_the_next_run_reports_what_a_followed_run_did_not(
    continuing: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    continuing.commit("insert into b values (0, 1)")
    continuing.land()
    # The run ends with reports in hand, as if its successor waits.
    monkeypatch.setattr(MergeReports, "yield_kept", _none_while_busy(MergeReports.yield_kept))
    monkeypatch.setattr(merge_reports, "SECONDS_BEFORE_SUCCESSOR", 0.0)
    monkeypatch.setattr(LongRun, "find", lambda self, look: setattr(self, "is_ending", True))
    request = asked(continuing, "merges")
    result = continuing.execute(request, "merge")
    assert result.success
    assert materialized(result, B) == []
    assert continuing.equals_source("b")
    monkeypatch.undo()
    monkeypatch.setattr(module, "IDLE_SECONDS", 2.0)

    # The successor was requested for the window that the first run merged.
    result = continuing.execute(request, "merge")
    assert result.success
    assert materialized(result, B) == continuing.windows()
    (event,) = (e for e in result.get_asset_materialization_events() if e.asset_key == B)
    version = (event.materialization.tags or {})["dagster/data_version"]
    assert version, "not the version of a merge without changes"


def _is(count: object, wanted: int) -> bool:
    return count() == wanted  # type: ignore[operator, no-any-return]


def _none_while_busy(yield_kept: object) -> object:
    """Report nothing while the run merges; `yield_some` sees the reports."""

    def kept(self: MergeReports, is_busy: object) -> object:
        return yield_kept(self, lambda: True)  # type: ignore[operator]

    return kept
