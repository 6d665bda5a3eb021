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
from dagster._core.execution.stats import StepEventStatus

CAPTURE_TAG = "pgcdc/capture"
PURPOSE_TAG = "pgcdc/purpose"
THROUGH_TAG = "pgcdc/through"
PROCESS_TAG = "pgcdc/process"
# A copy whose run has it takes over a slot that something else has read before.
ADOPT_SLOT_TAG = "pgcdc/adopt_slot"

UNFINISHED = [
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
FINISHED = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]

MAX_COUNTED = 50

_ENDED = (StepEventStatus.SUCCESS, StepEventStatus.FAILURE, StepEventStatus.SKIPPED)


@dataclass(frozen=True)
class Attempts:
    """Earlier runs for the same thing.

    Attributes:
        count: at most `MAX_COUNTED`, which is enough for how long to wait.
        newest: id of the newest run; None when there was none. In a run key it makes each attempt's
            another one than all before: the count stands still in the end, and Dagster skips a key
            that it knows for ever.
    """

    count: int
    newest: str | None
    seconds_since_end: float | None


def process_tag(pid: int | None = None) -> str:
    """Name a process so that it is not taken for another one that got its number later."""
    number = os.getpid() if pid is None else pid
    return f"{socket.gethostname()}:{number}:{_start_ticks(number)}"


def claim_run(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> None:
    """Write this process into the run's tags, so that its death can be noticed."""
    context.instance.add_run_tags(context.run.run_id, {PROCESS_TAG: process_tag()})


def find_unfinished(
    instance: dg.DagsterInstance, job_name: str, keys: Collection[dg.AssetKey], step: str
) -> DagsterRun | None:
    """Find a queued or running run that is to materialise the assets, however it was launched.

    Runs started by "Materialize" in the UI belong to Dagster's implicit job and carry none of our
    tags, so the selection is looked at too. Such a run may have other steps: a run whose step for
    the assets has ended is not in the way of the next one.

    Args:
        step: key of the step that materialises the assets.
    """
    wanted = frozenset(keys)
    for run in instance.get_runs(RunsFilter(statuses=UNFINISHED)):
        if run.job_name == job_name:
            return run
        if not wanted.isdisjoint(run.asset_selection or ()) and not has_ended(instance, run, step):
            return run
    return None


def has_ended(instance: dg.DagsterInstance, run: DagsterRun, step: str) -> bool:
    """Whether a step of a run that goes on has succeeded, failed or was skipped."""
    if run.status == DagsterRunStatus.QUEUED:
        return False
    stats = instance.event_log_storage.get_step_stats_for_run(run.run_id, [step])
    return any(each.status in _ENDED for each in stats)


def close_dead_runs(
    instance: dg.DagsterInstance, capture: str, keys: Collection[dg.AssetKey]
) -> None:
    """Mark a capture's runs as failed whose process on this machine is gone.

    Runs of all its jobs: a rebuild or an upkeep that was killed holds the merge's pool as well.

    Args:
        keys: assets of the capture, by which runs of Dagster's implicit job are known.
    """
    ours = frozenset(keys)
    started = [DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
    for run in instance.get_runs(RunsFilter(statuses=started)):
        if run.tags.get(CAPTURE_TAG) == capture or not ours.isdisjoint(_touched_assets(run)):
            _close_if_dead(instance, run)


def attempts_for(
    instance: dg.DagsterInstance, capture: str, purpose: str, tags: dict[str, str]
) -> Attempts:
    """Look at the runs made for the same purpose and tags, whatever became of them."""
    wanted = {CAPTURE_TAG: capture, PURPOSE_TAG: purpose, **tags}
    records = instance.get_run_records(RunsFilter(tags=wanted), limit=MAX_COUNTED)
    newest = records[0].dagster_run.run_id if records else None
    return Attempts(len(records), newest, seconds_since_end(records))


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


def _touched_assets(run: DagsterRun) -> set[dg.AssetKey]:
    """The assets that a run was asked to materialise or to check."""
    checked = {check.asset_key for check in run.asset_check_selection or ()}
    return checked.union(run.asset_selection or ())


def _close_if_dead(instance: dg.DagsterInstance, run: DagsterRun) -> None:
    tag = run.tags.get(PROCESS_TAG)
    if tag is None:
        return
    host, pid, start_ticks = tag.rsplit(":", 2)
    if host != socket.gethostname() or _start_ticks(int(pid)) == start_ticks:
        return
    # Read again: a process writes how its run ended before it goes, and other sensors close too.
    now = instance.get_run_by_id(run.run_id)
    if now is None or now.is_finished or now.tags.get(PROCESS_TAG) != tag:
        return
    if _is_inherited(instance, run, tag):
        return
    instance.report_run_failed(
        run,
        message=f"Process {pid} of this run is gone: it was killed. The next run goes on from "
        "here.",
    )
    instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)


def _is_inherited(instance: dg.DagsterInstance, run: DagsterRun, tag: str) -> bool:
    """Whether a run has the process of the run that it repeats: its own step did not start yet."""
    parent = instance.get_run_by_id(run.parent_run_id) if run.parent_run_id else None
    return parent is not None and parent.tags.get(PROCESS_TAG) == tag


def _start_ticks(pid: int) -> str:
    """When a process started, in clock ticks since boot: field 22 of /proc/PID/stat, proc(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    fields = stat.rpartition(")")[2].split()
    return "gone" if fields[0] == "Z" else fields[19]
