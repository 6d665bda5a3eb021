"""Runs that a person or the machine interrupts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dagster as dg
import psutil
import pytest

from pgcdc_assets.failpoints import AFTER_MERGE_STEP
from pgcdc_assets.orchestration.runs.records import THROUGH_TAG
from pgcdc_assets.policies import StepLimit
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.orchestration import run_process
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize(
    ("number", "is_asked"),
    [
        pytest.param(signal.SIGINT, False, id="ctrl-c"),
        pytest.param(signal.SIGTERM, True, id="terminated"),
        pytest.param(signal.SIGTERM, False, id="sigterm", marks=pytest.mark.soak),
    ],
)
def test_an_interrupted_run_is_canceled_without_a_stack_trace_and_loses_nothing(
    continuing: Orchestrated, number: signal.Signals, is_asked: bool
) -> None:
    """H9."""
    continuing.commit("insert into b values (0, 1)")
    (request,) = continuing.tick("lag").run_requests
    assert request.partition_key is not None
    tags = {**request.tags, "dagster/partition": request.partition_key}
    with _started(continuing, "capture", tags) as process:
        wait_until(lambda: continuing.zone.changes.windows(1), "a window", limit_seconds=60)
        (run,) = continuing.instance.get_runs(
            dg.RunsFilter(tags={THROUGH_TAG: request.partition_key})
        )
        if is_asked:
            continuing.instance.report_run_canceling(run)
        began = time.monotonic()
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    _check_canceled(continuing, run.run_id, output)

    continuing.commit("insert into b values (1, 1)")
    continuing.land()
    landed = continuing.zone.changes.windows(1)
    assert sum(summary.counts.get("public.b", {}).get("I", 0) for summary in landed) == 2


def _spark_starts(process: subprocess.Popen[str], target: Path) -> bool:
    return bool(psutil.Process(process.pid).children(recursive=True))


def _spark_writes(process: subprocess.Popen[str], target: Path) -> bool:
    return any(target.rglob("*.parquet"))


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.parametrize("has_begun", [_spark_starts, _spark_writes])
def test_a_merge_that_ctrl_c_interrupts_is_canceled_and_the_next_one_is_complete(
    orchestrated: Orchestrated, has_begun: Callable[[subprocess.Popen[str], Path], bool]
) -> None:
    """H9."""
    tags = _land_and_request_merge(orchestrated)
    target = Path(orchestrated.lake.path(NAME, "scd1", "public", "b"))
    with _started(orchestrated, "merge", tags) as process:
        wait_until(lambda: has_begun(process, target), "Spark", limit_seconds=120)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    _check_merge_canceled(orchestrated, output)
    _check_next_merge(orchestrated, tags)


@pytest.mark.soak
@pytest.mark.spark
def test_a_merge_that_is_terminated_after_a_step_is_canceled_and_the_next_one_is_complete(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H9."""
    capture = replace(orchestrated.capture, merge_step=StepLimit(changes=1))
    stepwise = Orchestrated(
        orchestrated.database, orchestrated.lake, orchestrated.instance, capture
    )
    tags = _land_and_request_merge(stepwise)
    monkeypatch.setenv("PGCDC_FAILPOINT", f"{AFTER_MERGE_STEP}:1:TERM")
    with _started(stepwise, "merge", tags) as process:
        output, _ = process.communicate(timeout=240)
    monkeypatch.delenv("PGCDC_FAILPOINT")
    _check_merge_canceled(stepwise, output)
    _check_next_merge(stepwise, tags)


def _started(location: Orchestrated, job: str, tags: dict[str, str]) -> subprocess.Popen[str]:
    environment = run_process.arguments(
        location.capture,
        location.database.conninfo,
        location.lake.uri,
        f"{NAME}_{job}",
        tags,
        location.instance.root_directory,
    )
    return subprocess.Popen(
        [sys.executable, "-m", run_process.__name__],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _land_and_request_merge(location: Orchestrated) -> dict[str, str]:
    """Land two windows with one row each, and return the tags of their merge run."""
    location.copy()
    for number in range(2):
        location.commit(f"insert into b values ({number}, 1)")
        location.land()
    (request,) = location.tick("merges").run_requests
    return dict(request.tags)


def _check_merge_canceled(location: Orchestrated, output: str) -> None:
    (run,) = location.instance.get_runs(dg.RunsFilter(job_name=f"{NAME}_merge"))
    _check_canceled(location, run.run_id, output)


def _check_canceled(location: Orchestrated, run_id: str, output: str) -> None:
    found = location.instance.get_run_by_id(run_id)
    assert found is not None
    assert found.status == dg.DagsterRunStatus.CANCELED, output
    assert "Traceback" not in output
    assert 'File "' not in output


def _check_next_merge(location: Orchestrated, tags: dict[str, str]) -> None:
    with _started(location, "merge", tags) as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert location.equals_source("b")
