"""Closing of runs whose process has ended, which releases their pool slots.

The default launcher cannot check the process of a run, so the instance shows a killed run as
started. A process of this PID namespace is looked up in /proc. A run of another container or
machine is dead if its newest heartbeat is old, and if this process has looked repeatedly for some
time and has seen no heartbeat. The heartbeat is old by the clock, or because this process has
watched it for so long: the clock of the other machine may be ahead. So neither different clocks nor
an unavailable storage close a live run.

A dead daemon leaves runs that have not begun. These runs are closed if the heartbeat of the daemon
is old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import dagster as dg
from dagster import DagsterRun, DagsterRunStatus, RunRecord, RunsFilter

from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs.claims import (
    BEAT_SECONDS,
    HEARTBEAT_TAG,
    PROCESS_TAG,
    last_heartbeat,
)
from pgcdc_assets.orchestration.runs.records import (
    CAPTURE_TAG,
    PURPOSE_TAG,
    is_canceled_before_start,
    is_claim_inherited,
    is_left_over,
    pools_of,
)
from pgcdc_assets.processes import ProcessIdentity, this_namespace

# A run is dead after this time without a heartbeat,
SILENT_SECONDS = 180.0
# and after this process has watched the run for this time without a heartbeat.
WATCHED_SECONDS = 3 * BEAT_SECONDS
# The watch begins again after a longer time without a look: the storage may have been unavailable,
# and a live run may write its next heartbeat after the next look.
LONGEST_GAP_SECONDS = 3 * BEAT_SECONDS
# No outages end just before so many looks. By default, Dagster's daemon evaluates the sensors of an
# instance one after another, so each gap may be long.
_MOST_GAPS = 3
# A run in the process that created it has its claim before it begins.
_CLAIMED = (DagsterRunStatus.NOT_STARTED, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING)


def close_dead_runs(
    instance: dg.DagsterInstance, capture: str, keys: Collection[dg.AssetKey]
) -> None:
    """Close a capture's runs whose process has ended, and runs of a dead daemon.

    Runs of all jobs are closed: a killed rebuild or maintenance also holds the merge's pool, and so
    does a killed run of a user's job, which lacks our tags.

    Args:
        keys: assets of the capture, which identify runs of Dagster's implicit job.
    """
    ours, pools = frozenset(keys), Names(capture).pools
    statuses = [*_CLAIMED, DagsterRunStatus.STARTING, DagsterRunStatus.QUEUED]
    for record in instance.get_run_records(RunsFilter(statuses=statuses)):
        run = record.dagster_run
        if (
            run.tags.get(CAPTURE_TAG) != capture
            and ours.isdisjoint(_touched_assets(run))
            and pools.isdisjoint(pools_of(run))
        ):
            continue
        if run.status in _CLAIMED and not is_canceled_before_start(instance, run):
            _close_if_dead(instance, run)
        else:
            _close_if_left_over(instance, record)


def _close_if_left_over(instance: dg.DagsterInstance, record: RunRecord) -> None:
    run = record.dagster_run
    if not is_left_over(instance, record):
        return
    if run.status == DagsterRunStatus.STARTING:
        _close(instance, run, "The run was launched, but its process did not begin.")
    elif run.status == DagsterRunStatus.CANCELING:
        _close(instance, run, "The run was terminated, and no process executes it.")
    elif PURPOSE_TAG in run.tags:
        # A sensor requests a run again. A run that a person requested stays in the queue.
        instance.report_run_canceled(
            run, "No Dagster daemon is running to start this run. The sensor requests it again."
        )


def _close_if_dead(instance: dg.DagsterInstance, run: DagsterRun) -> None:
    reason = _why_dead(run)
    if reason is None:
        return
    # Read the run again, because its process or another sensor may have ended it.
    now = instance.get_run_by_id(run.run_id)
    if now is None or now.is_finished or _claim_of(now) != _claim_of(run):
        return
    if is_claim_inherited(instance, run):
        return
    _close(instance, now, reason)


def _why_dead(run: DagsterRun) -> str | None:
    tag = run.tags.get(PROCESS_TAG, "")
    process = ProcessIdentity.parse(tag)
    if process is not None and process.is_visible:
        return _killed(process.pid) if process.has_ended else None
    if process is None and tag.count(":") == 2:
        host, pid, started = tag.split(":")
        # Early releases recorded neither boot nor namespace.
        place = this_namespace()
        if host == place.host and ProcessIdentity(place, int(pid), started).has_ended:
            return _killed(int(pid))
    beat = last_heartbeat(run)
    if beat is None:
        return None
    silent = _watch.seconds_without_change(run.run_id, run.tags[HEARTBEAT_TAG])
    if silent < WATCHED_SECONDS or max(silent, time.time() - beat) < SILENT_SECONDS:
        return None
    return (
        f"The run's process wrote no heartbeat for {SILENT_SECONDS:g} s: its container or "
        "machine has ended. The next run continues."
    )


def _killed(pid: int) -> str:
    return f"Process {pid} of this run was killed. The next run continues."


def _close(instance: dg.DagsterInstance, run: DagsterRun, reason: str) -> None:
    # Free the pools first. A run that has ended is not examined again, so its pools would remain
    # used if this process ended in between.
    instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    if run.status == DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, reason)
    else:
        instance.report_run_failed(run, message=reason)


def _claim_of(run: DagsterRun) -> tuple[str | None, str | None]:
    return run.tags.get(PROCESS_TAG), run.tags.get(HEARTBEAT_TAG)


def _touched_assets(run: DagsterRun) -> set[dg.AssetKey]:
    """Return the assets that a run materialises or checks."""
    checked = {check.asset_key for check in run.asset_check_selection or ()}
    return checked.union(run.asset_selection or ())


@dataclass(frozen=True)
class _Seen:
    """A run's newest heartbeat, as this process has watched it.

    Attributes:
        since: start of the watch, by the monotonic clock.
        looked_at: time of the last look.
        gaps: how many long gaps have begun the watch again.
    """

    heartbeat: str
    since: float
    looked_at: float
    gaps: int = 0


@dataclass
class _Watch:
    """The heartbeats that this process has seen."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def seconds_without_change(self, run_id: str, heartbeat: str) -> float:
        """Return for how long this process has looked repeatedly and has seen one heartbeat."""
        now = time.monotonic()
        with self._lock:
            known = self._seen.get(run_id)
            if known is None or known.heartbeat != heartbeat:
                # Remove the entries of ended runs.
                self._seen = {
                    key: seen
                    for key, seen in self._seen.items()
                    if now - seen.looked_at < 10 * SILENT_SECONDS
                }
                known = _Seen(heartbeat, now, now)
            elif now - known.looked_at > LONGEST_GAP_SECONDS and known.gaps < _MOST_GAPS:
                known = replace(known, since=now, gaps=known.gaps + 1)
            self._seen[run_id] = replace(known, looked_at=now)
            return now - known.since


_watch = _Watch()
