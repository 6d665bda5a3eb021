"""Runs of a command that wait for a pool which another run uses."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pgcdc_assets.orchestration.jobs.in_process import build_pool_wait, run_in_process
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs.claims import PROCESS_TAG, last_heartbeat
from pgcdc_assets.orchestration.runs.errors import error_of_run
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.orchestration.runs.test_pool_waits import (
    POOL,
    WAITED_SECONDS,
    pending,
    processor_seconds,
    waiting_step,
)
from pgcdc_assets_tests.orchestration.runs.test_records import (
    dead_process,
    hold,
    holders,
    status_of,
)

PROGRAM = f"""
import sys
import dagster as dg
from pgcdc_assets.orchestration.jobs.in_process import run_in_process

@dg.op(pool={POOL!r}, out=dg.Out(dg.Nothing))
def work(context):
    print("began", flush=True)

@dg.job
def job():
    work()

with dg.DagsterInstance.from_config(sys.argv[1]) as instance:
    try:
        run = run_in_process(job, instance, {{"a": "tag"}})
    except KeyboardInterrupt:
        print("interrupted")
    else:
        print(run.success)
"""


@pytest.fixture
def waiting(instance: dg.DagsterInstance, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command whose run waits for the pool."""
    with waiting_step(instance, tmp_path, PROGRAM, "work") as started:
        yield started


@pytest.mark.sampled
def test_a_command_waits_without_processor_time_and_begins_when_the_pool_is_free(
    instance: dg.DagsterInstance, waiting: subprocess.Popen[str]
) -> None:
    used = processor_seconds(waiting)
    time.sleep(WAITED_SECONDS)
    assert processor_seconds(waiting) - used < WAITED_SECONDS / 3
    (run,) = instance.get_runs()
    assert run.tags["a"] == "tag"
    assert last_heartbeat(run) is not None, "another process can see whether the run is dead"
    instance.event_log_storage.free_concurrency_slot_for_step("another run", "step")
    out, error = waiting.communicate(timeout=240)
    assert out.split() == ["began", "True"], error


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_does_not_wait_for_the_pool(
    instance: dg.DagsterInstance, waiting: subprocess.Popen[str], number: signal.Signals
) -> None:
    waiting.send_signal(number)
    out, error = waiting.communicate(timeout=60)
    assert out.split() == ["interrupted"], error
    assert "Traceback" not in error
    (run,) = instance.get_runs()
    assert run.status == dg.DagsterRunStatus.CANCELED
    assert pending(instance) == [], "the next run does not wait for a run that has ended"


def run_in_merge_pool(
    orchestrated: Orchestrated, limit_seconds: float, said: list[str]
) -> dg.ExecuteInProcessResult:
    """Run a job with a step in the pool of merges, as a command of the capture does."""

    @dg.op(pool=Names(NAME).merge_pool, out=dg.Out(dg.Nothing))
    def work() -> None:
        pass

    @dg.job
    def job() -> None:
        work()

    instance, repository = orchestrated.instance, orchestrated.location.repository
    wait = build_pool_wait(instance, repository, NAME, limit_seconds, say=said.append)
    return run_in_process(job, instance, {}, wait=wait)


@pytest.mark.postgres
def test_a_command_closes_dead_runs_that_hold_its_pool_or_wait_for_it(
    orchestrated: Orchestrated,
) -> None:
    """Without a daemon, no sensor closes them. A free pool goes to the run that waits longest."""
    pool = Names(NAME).merge_pool
    merge = orchestrated.start_run("merge", {PROCESS_TAG: dead_process()})
    hold(orchestrated, pool, merge)
    rebuild = orchestrated.start_run("rebuild", {PROCESS_TAG: dead_process()})
    orchestrated.instance.event_log_storage.claim_concurrency_slot(pool, rebuild.run_id, "step")
    assert run_in_merge_pool(orchestrated, limit_seconds=20, said=[]).success
    for run in (merge, rebuild):
        assert status_of(orchestrated, run) == dg.DagsterRunStatus.FAILURE
    assert holders(orchestrated, pool) == set()


@pytest.mark.postgres
def test_a_pool_is_free_after_the_end_of_a_command_that_closed_a_dead_run(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends between the two records. No later command examines a run that has ended."""
    pool = Names(NAME).merge_pool
    merge = orchestrated.start_run("merge", {PROCESS_TAG: dead_process()})
    hold(orchestrated, pool, merge)
    close = dg.DagsterInstance.report_run_failed

    def end(*arguments: Any, **options: Any) -> None:
        close(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(dg.DagsterInstance, "report_run_failed", end)
        repository = orchestrated.location.repository
        wait = build_pool_wait(orchestrated.instance, repository, NAME, say=lambda line: None)
        with pytest.raises(KeyboardInterrupt):
            wait.release()
    assert status_of(orchestrated, merge) == dg.DagsterRunStatus.FAILURE
    assert run_in_merge_pool(orchestrated, limit_seconds=5, said=[]).success


@pytest.mark.postgres
def test_a_wait_names_the_run_that_uses_the_pool_once_and_ends_at_its_limit(
    orchestrated: Orchestrated,
) -> None:
    pool = Names(NAME).merge_pool
    alive = orchestrated.start_run("rebuild", {})
    hold(orchestrated, pool, alive)
    said: list[str] = []
    result = run_in_merge_pool(orchestrated, limit_seconds=0.8, said=said)
    assert not result.success
    holder = f"run {alive.run_id} of {NAME}_rebuild"
    assert said == [f"Waiting for pool {pool}, which is used by {holder}"]
    error = error_of_run(result)
    assert error.exit_status == 3
    assert str(error) == (
        f"Pool {pool} is used by {holder}, and was not free within 0.8 s. Run the command again."
    )
    assert holders(orchestrated, pool) == {alive.run_id}
    info = orchestrated.instance.event_log_storage.get_concurrency_info(pool)
    assert info.pending_run_ids == set()
