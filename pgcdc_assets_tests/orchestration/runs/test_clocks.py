"""Ages of runs and their records: clocks that differ or are set back, outages, dead launches."""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Callable

import dagster as dg
import pytest

from pgcdc_assets.orchestration.runs.claims import HEARTBEAT_TAG, PROCESS_TAG, process_tag
from pgcdc_assets.orchestration.runs.records import seconds_since, seconds_since_end
from pgcdc_assets_tests.orchestration.conftest import Orchestrated


def ended(at: float) -> dg.RunRecord:
    """Return the record of a run that ended at a time."""
    now = dt.datetime.now(dt.UTC)
    run = dg.DagsterRun(job_name="t_capture")
    return dg.RunRecord(1, run, create_timestamp=now, update_timestamp=now, end_time=at)


def test_a_timestamp_in_the_future_is_old_beyond_the_difference_of_two_clocks() -> None:
    now = time.time()
    assert seconds_since(now - 100) == pytest.approx(100, abs=5)
    assert seconds_since(now + 20) == 0
    assert seconds_since(now + 3600) == math.inf


def test_a_failure_after_the_clock_was_set_back_has_its_pause() -> None:
    now = time.time()
    assert seconds_since_end([]) is None
    assert seconds_since_end([ended(now + 3600)]) == math.inf
    found = seconds_since_end([ended(now - 100), ended(now + 3600)])
    assert found == pytest.approx(100, abs=5)


@pytest.fixture
def status_after(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], dg.DagsterRunStatus]:
    """Return a function that lets time pass and looks at a run without later heartbeats."""
    passed = [0.0]
    wall, monotonic = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: wall() + passed[0])
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed[0])
    run = orchestrated.start_run("merge", {PROCESS_TAG: "elsewhere:boot:4026531836:7:1"})
    beat = {HEARTBEAT_TAG: f"{time.time():.0f} {run.run_id}"}
    orchestrated.instance.add_run_tags(run.run_id, beat)

    def look(seconds: float) -> dg.DagsterRunStatus:
        passed[0] += seconds
        orchestrated.tick("merges")
        found = orchestrated.instance.get_run_by_id(run.run_id)
        assert found is not None
        return found.status

    return look


@pytest.mark.postgres
def test_a_live_run_is_not_closed_at_the_end_of_an_outage_of_the_records(
    status_after: Callable[[float], dg.DagsterRunStatus],
) -> None:
    """The run could write no heartbeat, and writes the next one within 15 seconds."""
    assert status_after(0) is status_after(300) is dg.DagsterRunStatus.STARTED
    assert status_after(30) is dg.DagsterRunStatus.STARTED
    assert status_after(30) is dg.DagsterRunStatus.FAILURE


@pytest.mark.postgres
def test_a_dead_run_is_closed_although_each_look_is_long_after_the_one_before(
    status_after: Callable[[float], dg.DagsterRunStatus],
) -> None:
    """Dagster's daemon evaluates the sensors of an instance one after another."""
    for seconds in (0, 60, 60, 60):
        assert status_after(seconds) is dg.DagsterRunStatus.STARTED
    assert status_after(60) is dg.DagsterRunStatus.FAILURE


@pytest.mark.postgres
@pytest.mark.parametrize("claim", ["none", "own", "inherited"])
def test_a_run_that_was_terminated_before_its_process_began_blocks_other_runs_for_minutes_only(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    """Dagster asks for the end of a run also if there is no process, and waits for the end.

    Dagster copies the tags of a run to the run that repeats it.
    """
    orchestrated.copy()
    is_claimed = claim == "own"
    tags = {} if claim == "none" else {PROCESS_TAG: process_tag()}
    repeats = None
    if claim == "inherited":
        repeated = orchestrated.create_run("capture", tags)
        orchestrated.instance.report_run_failed(repeated)
        repeats = repeated.run_id
    run = orchestrated.start_run("capture", tags, repeats)
    orchestrated.instance.report_run_canceling(run)
    assert not orchestrated.tick("lag", one_shot=True).run_requests
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 400)
    assert bool(orchestrated.tick("lag", one_shot=True).run_requests) is not is_claimed
    found = orchestrated.instance.get_run_by_id(run.run_id)
    expected = dg.DagsterRunStatus.CANCELING if is_claimed else dg.DagsterRunStatus.CANCELED
    assert found is not None and found.status is expected
