"""Runs in the instance's books: that a run key never comes again, and that the dead are closed."""

from __future__ import annotations

import subprocess

import dagster as dg
import pytest
from dagster import DagsterEvent
from dagster._core.execution.plan.objects import StepFailureData, StepSuccessData
from dagster._core.utils import make_new_run_id

from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs import MAX_COUNTED, PROCESS_TAG, process_tag
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = pytest.mark.postgres

B = dg.AssetKey([NAME, "scd1", "public", "b"])


@pytest.mark.parametrize("job", ["snapshot", "capture", "merge"])
def test_a_run_key_never_comes_again_however_often_runs_failed(
    orchestrated: Orchestrated, job: str
) -> None:
    """H7: Dagster would skip the request for ever, and nothing would recover by itself."""
    if job != "snapshot":
        orchestrated.copy()
    if job == "merge":
        orchestrated.land()
    sensor = "merges" if job == "merge" else "lag"
    (first,) = orchestrated.tick(sensor).run_requests
    seen = {first.run_key}
    add_failures(orchestrated, first, MAX_COUNTED)
    for _ in range(3):
        add_failures(orchestrated, first, 1)
        (request,) = orchestrated.tick(sensor).run_requests
        assert request.tags == first.tags
        assert request.run_key not in seen
        seen.add(request.run_key)
        (again,) = orchestrated.tick(sensor).run_requests
        assert again.run_key == request.run_key


@pytest.mark.parametrize("sensor", ["lag", "merges"])
@pytest.mark.parametrize("job", ["capture", "rebuild", "upkeep"])
def test_a_run_whose_process_is_gone_gives_its_pool_back(
    orchestrated: Orchestrated, job: str, sensor: str
) -> None:
    run = orchestrated.start_run(job, {PROCESS_TAG: dead_process()})
    names = Names.of(orchestrated.capture)
    pool = names.slot_pool if job == "capture" else names.merge_pool
    hold(orchestrated, pool, run)
    # A younger run that waits for the pool must not hide the dead one.
    orchestrated.create_run("merge", {})
    orchestrated.tick(sensor)
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.FAILURE
    assert holders(orchestrated, pool) == set()


@pytest.mark.parametrize("is_check", [False, True])
def test_a_run_that_was_started_by_a_click_on_an_asset_is_closed_too(
    orchestrated: Orchestrated, is_check: bool
) -> None:
    run = dg.DagsterRun(
        job_name="__ASSET_JOB",
        run_id=make_new_run_id(),
        status=dg.DagsterRunStatus.STARTED,
        tags={PROCESS_TAG: dead_process()},
        asset_selection=frozenset() if is_check else frozenset({B}),
        asset_check_selection=frozenset({dg.AssetCheckKey(B, "invariants")}) if is_check else None,
    )
    orchestrated.instance.add_run(run)
    orchestrated.tick("merges")
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.FAILURE


@pytest.mark.parametrize("process", ["alive", "of another machine", "not told"])
def test_a_run_that_may_live_is_left_alone(orchestrated: Orchestrated, process: str) -> None:
    tags = {
        "alive": {PROCESS_TAG: process_tag()},
        "of another machine": {PROCESS_TAG: "elsewhere:1:1"},
        "not told": {},
    }
    run = orchestrated.start_run("rebuild", tags[process])
    orchestrated.tick("merges")
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.STARTED


def test_a_run_that_repeats_a_dead_one_is_not_taken_for_it(orchestrated: Orchestrated) -> None:
    """Dagster gives it the tags of the run that it repeats; its step writes its own later."""
    tag = {PROCESS_TAG: dead_process()}
    dead = orchestrated.start_run("upkeep", tag)
    orchestrated.tick("merges")
    repeated = orchestrated.start_run("upkeep", tag, repeats=dead.run_id)
    orchestrated.tick("merges")
    assert status_of(orchestrated, dead) == dg.DagsterRunStatus.FAILURE
    assert status_of(orchestrated, repeated) == dg.DagsterRunStatus.STARTED
    orchestrated.instance.add_run_tags(repeated.run_id, {PROCESS_TAG: dead_process()})
    orchestrated.tick("merges")
    assert status_of(orchestrated, repeated) == dg.DagsterRunStatus.FAILURE


@pytest.mark.parametrize("event", ["STEP_SUCCESS", "STEP_FAILURE"])
def test_a_run_with_other_steps_holds_a_sensor_up_only_until_its_own_step_has_ended(
    orchestrated: Orchestrated, event: str
) -> None:
    """A click may ask for raw, tables and checks in one run."""
    names = Names.of(orchestrated.capture)
    orchestrated.copy()
    orchestrated.land()
    run = start_click(orchestrated, {orchestrated.raw, B})
    orchestrated.commit("insert into b values (7, 1)")
    for sensor, step in (("lag", names.land_step), ("merges", names.merge_step)):
        report_step(orchestrated, run, step, "STEP_START")
        assert not orchestrated.tick(sensor).run_requests
        report_step(orchestrated, run, step, event)
        assert len(orchestrated.tick(sensor).run_requests) == 1
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.STARTED


def start_click(orchestrated: Orchestrated, keys: set[dg.AssetKey]) -> dg.DagsterRun:
    """Leave a started run of Dagster's implicit job in the books."""
    run = dg.DagsterRun(
        job_name="__ASSET_JOB",
        run_id=make_new_run_id(),
        status=dg.DagsterRunStatus.STARTED,
        asset_selection=frozenset(keys),
    )
    orchestrated.instance.add_run(run)
    return run


def report_step(orchestrated: Orchestrated, run: dg.DagsterRun, step: str, event: str) -> None:
    data = {
        "STEP_SUCCESS": StepSuccessData(duration_ms=1.0),
        "STEP_FAILURE": StepFailureData(error=None, user_failure_data=None),
    }
    orchestrated.instance.report_dagster_event(
        DagsterEvent(event, run.job_name, step_key=step, event_specific_data=data.get(event)),
        run.run_id,
    )


def add_failures(orchestrated: Orchestrated, request: dg.RunRequest, count: int) -> None:
    """Leave runs in the books that a sensor asked for and that failed."""
    for _ in range(count):
        orchestrated.instance.add_run(
            dg.DagsterRun(
                job_name=request.job_name or f"{NAME}_merge",
                run_id=make_new_run_id(),
                status=dg.DagsterRunStatus.FAILURE,
                tags=dict(request.tags),
            )
        )


def dead_process() -> str:
    child = subprocess.Popen(["sleep", "60"])
    tag = process_tag(child.pid)
    child.kill()
    child.wait()
    return tag


def hold(orchestrated: Orchestrated, pool: str, run: dg.DagsterRun) -> None:
    storage = orchestrated.instance.event_log_storage
    storage.initialize_concurrency_limit_to_default(pool)
    storage.claim_concurrency_slot(pool, run.run_id, "step")
    assert holders(orchestrated, pool) == {run.run_id}


def holders(orchestrated: Orchestrated, pool: str) -> set[str]:
    storage = orchestrated.instance.event_log_storage
    return storage.get_concurrency_info(pool).active_run_ids


def status_of(orchestrated: Orchestrated, run: dg.DagsterRun) -> dg.DagsterRunStatus:
    found = orchestrated.instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status
