"""Runs that wait for a pool which another run uses, in a process of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import psutil
import pytest

from pgcdc_assets_tests.support.waits import wait_until

POOL = "a/pool"
WAITED_SECONDS = 3.0

PROGRAM = f"""
import sys
import dagster as dg
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run_iterator
from dagster._utils.interrupts import capture_interrupts
from pgcdc_assets.orchestration.runs.executor import run_executor

@dg.op(pool={POOL!r}, out=dg.Out(dg.Nothing))
def work(context):
    print("began", flush=True)

@dg.op(out=dg.Out(dg.Nothing))
def other_work(context):
    pass

@dg.op(pool={POOL!r}, ins={{"start": dg.In(dg.Nothing)}}, out=dg.Out(dg.Nothing))
def later_work(context):
    print("began", flush=True)

@dg.job(executor_def=run_executor)
def job():
    if sys.argv[2] == "later":
        later_work(other_work())
    else:
        work()
        other_work()

with dg.DagsterInstance.from_config(sys.argv[1]) as instance, capture_interrupts():
    run = instance.create_run_for_job(job)
    for event in execute_run_iterator(InMemoryJob(job), run, instance):
        pass
    print(instance.get_run_by_id(run.run_id).status.value)
"""


@contextmanager
def waiting_step(
    instance: dg.DagsterInstance, folder: Path, text: str, step: str, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a process of its own, whose step waits for the pool.

    Args:
        folder: of the program.
        text: of the program.
        arguments: of the program, after the folder of the instance.
    """
    storage = instance.event_log_storage
    storage.initialize_concurrency_limit_to_default(POOL)
    assert storage.claim_concurrency_slot(POOL, "another run", "step").is_claimed
    program = folder / "program.py"
    program.write_text(text)
    started = subprocess.Popen(
        [sys.executable, str(program), instance.root_directory, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: pending(instance) == [step], "the run to wait", limit_seconds=60)
        yield started
    finally:
        started.kill()
        started.communicate()


@pytest.fixture(params=["first", "later"])
def waiting(
    instance: dg.DagsterInstance, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    """Start a run whose first or second step waits for the pool."""
    step = "work" if request.param == "first" else "later_work"
    with waiting_step(instance, tmp_path, PROGRAM, step, request.param) as started:
        yield started


def processor_seconds(process: subprocess.Popen[str]) -> float:
    """Return the processor time that a running process has used."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def pending(instance: dg.DagsterInstance) -> list[str]:
    """Return the steps that wait for the pool."""
    steps = instance.event_log_storage.get_concurrency_info(POOL).pending_steps
    return [step.step_key for step in steps if step.run_id != "another run"]


@pytest.mark.sampled
def test_a_run_waits_without_processor_time_and_begins_when_the_pool_is_free(
    instance: dg.DagsterInstance, waiting: subprocess.Popen[str]
) -> None:
    used = processor_seconds(waiting)
    time.sleep(WAITED_SECONDS)
    assert processor_seconds(waiting) - used < WAITED_SECONDS / 3
    instance.event_log_storage.free_concurrency_slot_for_step("another run", "step")
    out, error = waiting.communicate(timeout=60)
    assert out.split() == ["began", "SUCCESS"], error
    (run,) = instance.get_runs()
    messages = [event.message for event in instance.all_logs(run.run_id)]
    assert [each for each in messages if POOL in each] == [f"Step blocked by limit for pool {POOL}"]
    assert pending(instance) == []


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["signal", "Dagster"])
def test_a_terminated_run_does_not_wait_for_the_pool(
    instance: dg.DagsterInstance, waiting: subprocess.Popen[str], how: str
) -> None:
    if how == "signal":
        waiting.send_signal(signal.SIGTERM)
    else:
        instance.report_run_canceled(instance.get_runs()[0])
    out, error = waiting.communicate(timeout=120)
    assert out.split() == ["CANCELED"], out + error
    assert "Traceback" not in error
    assert pending(instance) == [], "the next run does not wait for a run that has ended"
