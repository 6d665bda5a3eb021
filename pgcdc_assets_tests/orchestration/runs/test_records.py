"""Runs in the instance's storage: unique run keys, and the end of dead runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterEvent
from dagster._core.execution.plan.objects import StepFailureData, StepSuccessData
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.utils import make_new_run_id
from dagster._daemon.types import DaemonHeartbeat

from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs import claims as run_claims
from pgcdc_assets.orchestration.runs import dead_runs
from pgcdc_assets.orchestration.runs.claims import (
    HEARTBEAT_TAG,
    PROCESS_TAG,
    claimed_run,
    process_tag,
)
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG, MAX_COUNTED, PURPOSE_TAG
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = pytest.mark.postgres

real_time = time.time

B = dg.AssetKey([NAME, "scd1", "public", "b"])


@pytest.mark.sampled
@pytest.mark.parametrize("job", ["snapshot", "capture", "merge"])
def test_run_keys_are_unique_after_any_number_of_failed_runs(
    orchestrated: Orchestrated, job: str
) -> None:
    """H7: Dagster would skip a repeated key at each evaluation."""
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
def test_a_run_whose_process_has_ended_frees_its_pool(
    orchestrated: Orchestrated, job: str, sensor: str
) -> None:
    run = orchestrated.start_run(job, {PROCESS_TAG: dead_process()})
    names = Names.of(orchestrated.capture)
    pool = names.slot_pool if job == "capture" else names.merge_pool
    hold(orchestrated, pool, run)
    # A later run that waits for the pool must not hide the dead run.
    orchestrated.create_run("merge", {})
    orchestrated.tick(sensor)
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.FAILURE
    assert holders(orchestrated, pool) == set()


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_run_whose_process_has_ended_before_the_run_began_is_closed(
    orchestrated: Orchestrated, is_dead: bool
) -> None:
    """`pgcdc sync` creates a run with its claim, and was killed before it started the run."""
    tags = {PROCESS_TAG: dead_process() if is_dead else process_tag()}
    run = orchestrated.create_run("snapshot", tags)
    requests = orchestrated.tick("lag").run_requests
    assert len(requests) == is_dead
    expected = dg.DagsterRunStatus.FAILURE if is_dead else dg.DagsterRunStatus.NOT_STARTED
    assert status_of(orchestrated, run) == expected


@pytest.mark.parametrize("is_check", [False, True])
def test_a_dead_run_that_was_started_in_the_ui_is_closed_too(
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


@pytest.mark.parametrize("process", ["alive", "of another machine", "unknown"])
def test_a_run_that_may_be_alive_is_not_closed(orchestrated: Orchestrated, process: str) -> None:
    tags = {
        "alive": {PROCESS_TAG: process_tag()},
        "of another machine": {PROCESS_TAG: "elsewhere:1:1"},
        "unknown": {},
    }
    run = orchestrated.start_run("rebuild", tags[process])
    orchestrated.tick("merges")
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.STARTED


@pytest.mark.sampled
def test_a_live_run_of_a_container_with_the_same_name_is_not_closed(
    orchestrated: Orchestrated,
) -> None:
    """A process id of a container names another process in this namespace, or no process."""
    with in_another_namespace() as tag:
        assert tag.split(":")[0] == process_tag().split(":")[0], "one host name"
        run = orchestrated.start_run("rebuild", {PROCESS_TAG: tag})
        orchestrated.tick("merges")
        assert status_of(orchestrated, run) == dg.DagsterRunStatus.STARTED


@pytest.mark.parametrize("skew", [0.0, -10_000.0, 10_000.0])
def test_a_run_of_an_ended_container_is_closed_after_its_last_heartbeat(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    """The time of observation counts, and not the clock of the container."""
    monkeypatch.setattr(dead_runs, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(dead_runs, "WATCHED_SECONDS", 0.5)
    pool = Names.of(orchestrated.capture).merge_pool
    run = orchestrated.start_run("merge", {PROCESS_TAG: "gone:boot:4026531836:7:1"})
    hold(orchestrated, pool, run)

    def beat(after: float) -> None:
        tag = {HEARTBEAT_TAG: f"{time.time() + skew + after:.0f} {run.run_id}"}
        orchestrated.instance.add_run_tags(run.run_id, tag)

    for beats in range(3):
        beat(float(beats))
        orchestrated.tick("merges")
        time.sleep(0.6)
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.STARTED
    time.sleep(3.5)
    orchestrated.tick("merges")
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.FAILURE
    assert holders(orchestrated, pool) == set()


def test_a_heartbeat_of_the_repeated_run_does_not_count(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_runs, "WATCHED_SECONDS", 0.0)
    inherited = {HEARTBEAT_TAG: "1000 another-run", PROCESS_TAG: "gone:boot:1:7:1"}
    run = orchestrated.start_run("merge", inherited)
    for _ in range(2):
        orchestrated.tick("merges")
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.STARTED


def test_the_heartbeat_continues_while_the_process_is_busy(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_claims, "BEAT_SECONDS", 0.05)
    written: list[str] = []

    def recorded(run_id: str) -> dict[str, str]:
        written.append(run_id)
        return {"beat": "now"}

    monkeypatch.setattr(run_claims, "claim_tags", recorded)
    run = orchestrated.start_run("merge", {})
    with claimed_run(orchestrated.instance, run), claimed_run(orchestrated.instance, run):
        until = time.monotonic() + 20
        while len(written) < 3 and time.monotonic() < until:
            sum(range(1000))
    assert len(written) >= 3
    ended = len(written)
    time.sleep(0.3)
    assert len(written) == ended
    found = orchestrated.instance.get_run_by_id(run.run_id)
    assert found is not None
    assert found.tags["beat"] == "now"


@pytest.mark.parametrize("daemon", ["alive", "dead", "never there"])
@pytest.mark.parametrize("asked_by", ["sensor", "click"])
def test_a_queued_run_blocks_only_while_a_daemon_can_start_it(
    orchestrated: Orchestrated, asked_by: str, daemon: str
) -> None:
    """`pgcdc sync` must not wait until a person starts a daemon."""
    orchestrated.copy()
    if daemon != "never there":
        age = 0 if daemon == "alive" else 600
        orchestrated.instance.add_daemon_heartbeat(
            DaemonHeartbeat(time.time() - age, "QUEUED_RUN_COORDINATOR", "d", None)
        )
    by_sensor = {CAPTURE_TAG: NAME, PURPOSE_TAG: "capture"}
    run = dg.DagsterRun(
        job_name=f"{NAME}_capture" if asked_by == "sensor" else "__ASSET_JOB",
        run_id=make_new_run_id(),
        status=dg.DagsterRunStatus.QUEUED,
        asset_selection=frozenset({orchestrated.raw}),
        tags=by_sensor if asked_by == "sensor" else {},
        remote_job_origin=remote_origin(f"{NAME}_capture"),
    )
    orchestrated.instance.add_run(run)
    asked = len(orchestrated.tick("lag", one_shot=True).run_requests)
    assert asked == (0 if daemon == "alive" else 1)
    is_canceled = daemon != "alive" and asked_by == "sensor"
    status = dg.DagsterRunStatus.CANCELED if is_canceled else dg.DagsterRunStatus.QUEUED
    assert status_of(orchestrated, run) == status


@pytest.mark.parametrize(
    ("left", "becomes"),
    [
        (dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.FAILURE),
        (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.NOT_STARTED),
    ],
)
def test_a_run_that_never_began_does_not_block_other_runs_indefinitely(
    orchestrated: Orchestrated,
    monkeypatch: pytest.MonkeyPatch,
    left: dg.DagsterRunStatus,
    becomes: dg.DagsterRunStatus,
) -> None:
    orchestrated.copy()
    run = dg.DagsterRun(
        job_name=f"{NAME}_capture",
        run_id=make_new_run_id(),
        status=left,
        tags={CAPTURE_TAG: NAME, PURPOSE_TAG: "capture"},
    )
    orchestrated.instance.add_run(run)
    assert not orchestrated.tick("lag", one_shot=True).run_requests
    monkeypatch.setattr(time, "time", lambda: real_time() + 400)
    assert len(orchestrated.tick("lag", one_shot=True).run_requests) == 1
    assert status_of(orchestrated, run) == becomes


def test_a_dead_run_with_a_cancellation_request_is_canceled(
    orchestrated: Orchestrated,
) -> None:
    run = orchestrated.start_run("merge", {PROCESS_TAG: dead_process()})
    orchestrated.instance.report_run_canceling(run)
    orchestrated.tick("merges")
    assert status_of(orchestrated, run) == dg.DagsterRunStatus.CANCELED


@contextmanager
def in_another_namespace() -> Iterator[str]:
    """Return the tag of a process in another PID namespace."""
    code = "import sys; from pgcdc_assets.orchestration.runs.claims import process_tag; "
    code += "print(process_tag(), flush=True); sys.stdin.read()"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        tag = child.stdout.readline().strip()
        if not tag:
            pytest.skip("this machine does not allow a new PID namespace")
        yield tag


def remote_origin(job: str) -> RemoteJobOrigin:
    location = RegisteredCodeLocationOrigin("tests")
    return RemoteJobOrigin(RemoteRepositoryOrigin(location, "tests"), job)


def test_a_run_that_repeats_a_dead_run_is_not_closed_as_dead(orchestrated: Orchestrated) -> None:
    """Dagster copies the tags of the repeated run, and the step replaces the tags later."""
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


@pytest.mark.sampled
@pytest.mark.parametrize("event", ["STEP_SUCCESS", "STEP_FAILURE"])
def test_a_run_with_other_steps_blocks_a_sensor_only_until_its_step_has_ended(
    orchestrated: Orchestrated, event: str
) -> None:
    """A materialisation in the UI may select raw, tables and checks in one run."""
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
    """Record a started run of Dagster's implicit job."""
    run = dg.DagsterRun(
        job_name="__ASSET_JOB",
        run_id=make_new_run_id(),
        status=dg.DagsterRunStatus.STARTED,
        asset_selection=frozenset(keys),
    )
    orchestrated.instance.add_run(run)
    return run


def report_step(orchestrated: Orchestrated, run: dg.DagsterRun, step: str, event: str) -> None:
    data: dict[str, Any] = {
        # Dagster has no type annotations for these two functions.
        "STEP_SUCCESS": StepSuccessData(duration_ms=1.0),  # type: ignore[no-untyped-call]
        "STEP_FAILURE": StepFailureData(  # type: ignore[no-untyped-call]
            error=None, user_failure_data=None
        ),
    }
    orchestrated.instance.report_dagster_event(
        DagsterEvent(event, run.job_name, step_key=step, event_specific_data=data.get(event)),
        run.run_id,
    )


def add_failures(orchestrated: Orchestrated, request: dg.RunRequest, count: int) -> None:
    """Record failed runs of a sensor."""
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
