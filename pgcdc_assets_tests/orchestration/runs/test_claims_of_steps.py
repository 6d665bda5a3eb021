"""Runs of a job of the user, whose executor gives each step a process of its own."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import dagster as dg
import pytest

from pgcdc_assets.orchestration.runs.claims import claim_run
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

END = "PGCDC_TEST_END_OF_STEP"


@dg.op(out=dg.Out(dg.Nothing))
def merge(context: dg.OpExecutionContext) -> None:
    """Claim the run, as each step of the package does."""
    with claim_run(context):
        context.log.info("merged")


@dg.op(ins={"start": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def report() -> None:
    """A later step of the user."""
    wait_until(Path(os.environ[END]).exists, "the end of the step")


@dg.job(executor_def=dg.multiprocess_executor, tags={CAPTURE_TAG: NAME})
def nightly() -> None:
    report(start=merge())


def nightly_job() -> dg.JobDefinition:
    return nightly


@pytest.mark.sampled
def test_a_run_is_not_closed_as_dead_after_the_process_of_a_step_has_ended(
    orchestrated: Orchestrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, end = orchestrated.instance, tmp_path / "end"
    monkeypatch.setenv(END, str(end))
    results: list[bool] = []

    def run() -> None:
        job = dg.reconstructable(nightly_job)
        results.append(dg.execute_job(job, instance, raise_on_error=False).success)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: "report" in started_steps(instance), "the later step")
        # The process of the first step ends soon after its last event.
        time.sleep(2)
        for sensor in ("lag", "merges"):
            orchestrated.tick(sensor)
        (found,) = instance.get_runs()
        assert found.status is dg.DagsterRunStatus.STARTED
    finally:
        end.touch()
        thread.join(120)
    assert results == [True]


@pytest.mark.sampled
def test_a_run_whose_process_is_killed_between_two_steps_is_closed(
    orchestrated: Orchestrated, tmp_path: Path
) -> None:
    """The process of the later step belongs to the user, and has no claim."""
    instance, end = orchestrated.instance, tmp_path / "end"
    code = (
        f"import dagster as dg; from {__name__} import nightly_job; "
        "dg.execute_job(dg.reconstructable(nightly_job), dg.DagsterInstance.get())"
    )
    home = {"DAGSTER_HOME": instance.root_directory, END: str(end)}
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **home})
    try:
        wait_until(lambda: "report" in started_steps(instance), "the later step", limit_seconds=120)
        orchestrated.tick("lag")
        (found,) = instance.get_runs()
        assert found.status is dg.DagsterRunStatus.STARTED
        process.kill()
        process.wait()
        orchestrated.tick("lag")
        (found,) = instance.get_runs()
        assert found.status is dg.DagsterRunStatus.FAILURE
    finally:
        end.touch()
        process.kill()
        process.wait()


def started_steps(instance: dg.DagsterInstance) -> set[str]:
    runs = instance.get_runs()
    logs = [entry for run in runs for entry in instance.all_logs(run.run_id)]
    return {
        entry.step_key or ""
        for entry in logs
        if entry.dagster_event is not None and entry.dagster_event.is_step_start
    }
