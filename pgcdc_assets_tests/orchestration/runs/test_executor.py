"""Signals that arrive while Dagster's code runs, before a step or between its events."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import signal
import sys
import dagster as dg
from pgcdc_assets.orchestration.runs.claims import claim_run, claimed_step
from pgcdc_assets.orchestration.runs.executor import run_executor

place = sys.argv[1]

@dg.op(out=dg.Out(dg.Nothing))
def first(context):
    with claim_run(context):
        print("first", flush=True)

def _second(context):
    print("second", flush=True)
    if place == "events":
        storage = context.instance.event_log_storage
        store_event = storage.store_event
        def store(event):
            if event.is_dagster_event and event.dagster_event.is_step_materialization:
                os.kill(os.getpid(), signal.SIGINT)
            return store_event(event)
        storage.store_event = store
    yield dg.AssetMaterialization("a")
    print("after the event", flush=True)
    yield dg.Output(None)

@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def second(context):
    yield from claimed_step(_second)(context)

@dg.job(executor_def=run_executor)
def job():
    second(first())

@dg.repository
def repository():
    return [job]

if __name__ == "__main__":
    from dagster._core.execution.api import execute_run_iterator
    from dagster._core.definitions.job_base import InMemoryJob
    from dagster._utils.interrupts import capture_interrupts
    with dg.DagsterInstance.ephemeral() as instance, capture_interrupts():
        run = instance.create_run_for_job(job)
        if place == "start":
            os.kill(os.getpid(), signal.SIGTERM)
        for event in execute_run_iterator(InMemoryJob(job), run, instance):
            if place == "steps" and event.is_step_success and event.step_key == "first":
                os.kill(os.getpid(), signal.SIGTERM)
        print(instance.get_run_by_id(run.run_id).status.value)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "printed"),
    [
        ("nowhere", ["first", "second", "after the event", "SUCCESS"]),
        ("start", ["CANCELED"]),
        ("steps", ["first", "CANCELED"]),
        ("events", ["first", "second", "CANCELED"]),
    ],
)
def test_a_signal_outside_the_code_of_a_step_cancels_the_run_without_a_stack_trace(
    place: str, printed: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), place], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split("\n")[:-1] == printed, done.stderr
    assert "Traceback" not in done.stderr
    assert 'File "' not in done.stderr
