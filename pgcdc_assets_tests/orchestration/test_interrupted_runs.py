"""Runs that a person or the machine interrupts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import dagster as dg
import pytest

from pgcdc_assets.orchestration.runs import THROUGH_TAG
from pgcdc_assets_tests.fixtures.waiting import wait_until
from pgcdc_assets_tests.orchestration import run_process
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

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
    going_on: Orchestrated, number: signal.Signals, is_asked: bool
) -> None:
    """H9."""
    going_on.commit("insert into b values (0, 1)")
    (request,) = going_on.tick("lag").run_requests
    assert request.partition_key is not None
    tags = {**request.tags, "dagster/partition": request.partition_key}
    environment = run_process.arguments(
        going_on.capture,
        going_on.database.conninfo,
        going_on.lake.uri,
        f"{NAME}_capture",
        tags,
        going_on.instance.root_directory,
    )
    with subprocess.Popen(
        [sys.executable, "-m", run_process.__name__],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        wait_until(lambda: going_on.zone.changes.windows(1), "a window", limit_seconds=60)
        (run,) = going_on.instance.get_runs(
            dg.RunsFilter(tags={THROUGH_TAG: request.partition_key})
        )
        if is_asked:
            going_on.instance.report_run_canceling(run)
        began = time.monotonic()
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    found = going_on.instance.get_run_by_id(run.run_id)
    assert found is not None
    assert found.status == dg.DagsterRunStatus.CANCELED, output[-3000:]
    assert "Traceback" not in output
    assert 'File "' not in output

    going_on.commit("insert into b values (1, 1)")
    going_on.land()
    landed = going_on.zone.changes.windows(1)
    assert sum(summary.counts.get("public.b", {}).get("I", 0) for summary in landed) == 2
