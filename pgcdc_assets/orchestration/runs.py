"""What the Dagster instance knows about runs: which are under way, which attempts there were.

A run that was killed stays "started" in the instance's books, because the default launcher cannot
ask whether its process lives. So each of our steps writes its process into the run's tags, and a
run whose process is gone on this machine is closed here, together with the pool slots it holds.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
from dagster import DagsterRun, DagsterRunStatus, RunRecord, RunsFilter

CAPTURE_TAG = "pgcdc/capture"
PURPOSE_TAG = "pgcdc/purpose"
THROUGH_TAG = "pgcdc/through"
PROCESS_TAG = "pgcdc/process"

UNFINISHED = [
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
FINISHED = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]


@dataclass(frozen=True)
class Attempts:
    """Earlier runs for the same thing."""

    count: int
    seconds_since_end: float | None


def process_tag(pid: int | None = None) -> str:
    """Name a process so that it is not taken for another one that got its number later."""
    number = os.getpid() if pid is None else pid
    return f"{socket.gethostname()}:{number}:{_start_ticks(number)}"


def claim_run(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> None:
    """Write this process into the run's tags, so that its death can be noticed."""
    context.instance.add_run_tags(context.run_id, {PROCESS_TAG: process_tag()})


def find_unfinished(
    instance: dg.DagsterInstance, job_name: str, keys: Collection[dg.AssetKey]
) -> DagsterRun | None:
    """Find a queued or running run that touches the assets, however it was launched.

    Runs started by "Materialize" in the UI belong to Dagster's implicit job and carry none of our
    tags, so the selection is looked at too.
    """
    wanted = frozenset(keys)
    for run in instance.get_runs(RunsFilter(statuses=UNFINISHED)):
        is_ours = run.job_name == job_name or not wanted.isdisjoint(run.asset_selection or ())
        if is_ours and not _close_if_dead(instance, run):
            return run
    return None


def attempts_for(
    instance: dg.DagsterInstance, capture: str, purpose: str, tags: dict[str, str]
) -> Attempts:
    """Count the runs made for the same purpose and tags, whatever became of them."""
    wanted = {CAPTURE_TAG: capture, PURPOSE_TAG: purpose, **tags}
    records = instance.get_run_records(RunsFilter(tags=wanted), limit=50)
    return Attempts(len(records), seconds_since_end(records))


def recent_runs(
    instance: dg.DagsterInstance, capture: str, purpose: str, limit: int = 25
) -> list[RunRecord]:
    """Return the newest finished runs of one purpose, newest first."""
    wanted = {CAPTURE_TAG: capture, PURPOSE_TAG: purpose}
    return list(instance.get_run_records(RunsFilter(tags=wanted, statuses=FINISHED), limit=limit))


def seconds_since_end(records: Iterable[RunRecord]) -> float | None:
    """Time since the last of the runs ended; None when none has."""
    ends = [record.end_time for record in records if record.end_time is not None]
    return max(0.0, time.time() - max(ends)) if ends else None


def _close_if_dead(instance: dg.DagsterInstance, run: DagsterRun) -> bool:
    """Mark a run as failed whose process on this machine is gone."""
    tag = run.tags.get(PROCESS_TAG)
    if tag is None or run.status not in (DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING):
        return False
    host, pid, start_ticks = tag.rsplit(":", 2)
    if host != socket.gethostname() or _start_ticks(int(pid)) == start_ticks:
        return False
    instance.report_run_failed(
        run,
        message=f"Process {pid} of this run is gone: it was killed. The next run goes on from "
        "here.",
    )
    instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    return True


def _start_ticks(pid: int) -> str:
    """When a process started, in clock ticks since boot: field 22 of /proc/PID/stat, proc(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    fields = stat.rpartition(")")[2].split()
    return "gone" if fields[0] == "Z" else fields[19]
