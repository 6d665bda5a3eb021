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

from pgcdc_assets.failpoints import AFTER_MERGE_STEP, AFTER_RANGE_COMMIT
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.runs.records import THROUGH_TAG
from pgcdc_assets.settings.policies import SnapshotPolicy, StepLimit
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.handover import copied_rows
from pgcdc_assets_tests.support.orchestration import run_process
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("number", "asked_seconds"),
    [
        pytest.param(signal.SIGINT, None, id="ctrl-c"),
        # The run sees the request before the signal arrives.
        pytest.param(signal.SIGTERM, 0.7, id="terminated"),
        pytest.param(None, 0.0, id="asked"),
        pytest.param(signal.SIGTERM, 0.0, id="at once", marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, None, id="sigterm", marks=pytest.mark.soak),
    ],
)
def test_an_interrupted_run_is_canceled_without_a_stack_trace_and_loses_nothing(
    continuing: Orchestrated, number: signal.Signals | None, asked_seconds: float | None
) -> None:
    """H9: by a signal, by a request in Dagster, or by a request that a signal follows."""
    continuing.commit("insert into b values (0, 1)")
    (request,) = continuing.tick("lag").run_requests
    assert request.partition_key is not None
    tags = {**request.tags, "dagster/partition": request.partition_key}
    with _started(continuing, "capture", tags) as process:
        wait_until(lambda: continuing.zone.changes.windows(1), "a window", limit_seconds=60)
        (run,) = continuing.instance.get_runs(
            dg.RunsFilter(tags={THROUGH_TAG: request.partition_key})
        )
        began = time.monotonic()
        if asked_seconds is not None:
            continuing.instance.report_run_canceling(run)
            time.sleep(asked_seconds)
        if number is not None:
            process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    _check_canceled(continuing, run.run_id, output)

    continuing.commit("insert into b values (1, 1)")
    continuing.land()
    landed = continuing.zone.changes.windows(1)
    assert sum(summary.counts.get("public.b", {}).get("I", 0) for summary in landed) == 2


@pytest.mark.sampled
def test_a_run_is_canceled_while_its_server_does_not_answer(
    continuing: Orchestrated, proxy: TcpProxy
) -> None:
    """H9: the signal arrives during a query, which Python cannot interrupt."""
    continuing.commit("insert into b values (0, 1)")
    (request,) = continuing.tick("lag").run_requests
    tags = {**request.tags, "dagster/partition": request.partition_key or ""}
    conninfo = proxy.conninfo(continuing.database.conninfo)
    with _started(continuing, "capture", tags, conninfo) as process:
        wait_until(lambda: continuing.zone.changes.windows(1), "a window", limit_seconds=60)
        (run,) = continuing.instance.get_runs(
            dg.RunsFilter(tags={THROUGH_TAG: tags["dagster/partition"]})
        )
        proxy.stall()
        # The next look at the end of the WAL waits for its answer.
        time.sleep(2)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    _check_canceled(continuing, run.run_id, output)


@pytest.mark.sampled
def test_the_next_run_resumes_a_snapshot_that_was_terminated_in_the_ui(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: terminating the run pauses its snapshot, and the next run resumes the snapshot."""
    database = orchestrated.database
    database.execute("insert into b select i, 1 from generate_series(1, 3000) i")
    capture = replace(orchestrated.capture, snapshot=SnapshotPolicy(1, range_bytes=16384))
    location = Orchestrated(database, orchestrated.lake, orchestrated.instance, capture)
    location.copy()
    [first] = [s for s in location.zone.snapshots.complete_snapshots() if s.table == "b"]
    tags = {"dagster/partition": "public.b"}
    # The stopped process is in the middle of the snapshot when the request arrives.
    monkeypatch.setenv("PGCDC_FAILPOINT", f"{AFTER_RANGE_COMMIT}:3:STOP")
    with _started(location, "snapshot", tags) as process:
        wait_until(
            lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED,
            "the third range",
            limit_seconds=120,
        )
        run = location.instance.get_runs(dg.RunsFilter(job_name=f"{NAME}_snapshot"), limit=1)[0]
        location.instance.report_run_canceling(run)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=120)
    monkeypatch.delenv("PGCDC_FAILPOINT")
    _check_canceled(location, run.run_id, output)
    assert len(location.zone.ranges.all()) >= 3
    wait_until(
        lambda: (
            not database.query(
                "select from pg_stat_activity where datname = current_database() "
                "and application_name ~ '^pgcdc (copy|snapshot)'"
            )
        ),
        "the sessions of the snapshot to end",
    )
    assert location.zone.snapshots.complete_snapshots()[-1].snapshot_lsn == first.snapshot_lsn

    database.execute("delete from b where id = 1; update b set n = 2 where id = 3000")
    with _started(location, "snapshot", tags) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    event = location.instance.get_latest_materialization_event(dg.AssetKey([NAME, "snapshot"]))
    assert event is not None and event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    assert metadata["ranges_continued"].value >= 3  # type: ignore[operator]
    assert "snapshot_xmin_age" in metadata
    second = Lsn.parse(str(metadata["snapshot_lsn"].value))
    assert second > first.snapshot_lsn
    found = {row[0]: row[1] for row in copied_rows(location.zone, "b", second)}
    assert found == dict(database.query("select id::text, n::text from b"))
    assert location.zone.ranges.all() == []


def _spark_starts(process: subprocess.Popen[str], target: Path) -> bool:
    return bool(psutil.Process(process.pid).children(recursive=True))


def _spark_writes(process: subprocess.Popen[str], target: Path) -> bool:
    return any(target.rglob("*.parquet"))


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.parametrize("has_begun", [_spark_starts, _spark_writes])
def test_a_merge_interrupted_by_ctrl_c_is_canceled_and_the_next_merge_is_complete(
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
def test_a_merge_terminated_after_a_step_is_canceled_and_the_next_merge_is_complete(
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


def _started(
    location: Orchestrated, job: str, tags: dict[str, str], conninfo: str = ""
) -> subprocess.Popen[str]:
    environment = run_process.arguments(
        location.capture,
        conninfo or location.database.conninfo,
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
