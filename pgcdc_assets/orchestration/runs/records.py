"""Records of the Dagster instance about unfinished runs and earlier attempts."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass

import dagster as dg
from dagster import DagsterRun, DagsterRunStatus, RunRecord, RunsFilter
from dagster._core.execution.stats import StepEventStatus
from dagster._core.storage.tags import MAX_RETRIES_TAG

from pgcdc_assets.orchestration.names import PooledStep
from pgcdc_assets.orchestration.runs.claims import PROCESS_TAG, last_heartbeat

CAPTURE_TAG = "pgcdc/capture"
PURPOSE_TAG = "pgcdc/purpose"
MERGE_PURPOSE = "merge"
MESSAGES_PURPOSE = "messages"
THROUGH_TAG = "pgcdc/through"
# A snapshot run with this tag takes over a slot that another consumer has read.
ADOPT_SLOT_TAG = "pgcdc/adopt_slot"
# A snapshot run with this tag reads the rows that match the predicate of its command.
PARTIAL_TAG = "pgcdc/partial"

UNFINISHED = [
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
FINISHED = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]

MAX_COUNTED = 50

# A run that has not begun within this time after its request or launch will not begin.
START_SECONDS = 300.0
# The clocks of two machines differ by less than this time. A record further in the future is from
# before the clock was set back.
CLOCK_DIFFERENCE_SECONDS = 60.0
# The daemon's heartbeat has an interval of 30 s.
DAEMON_SILENT_SECONDS = 120.0

_QUEUE_DAEMON = "QUEUED_RUN_COORDINATOR"

_ENDED = (StepEventStatus.SUCCESS, StepEventStatus.FAILURE, StepEventStatus.SKIPPED)


@dataclass(frozen=True)
class Attempts:
    """Earlier runs with the same purpose.

    Attributes:
        count: number of runs, at most `MAX_COUNTED`, which determines the backoff.
        newest: id of the newest run; None without a run. The id makes the run key of each attempt
            unique, because Dagster skips a run key that was used before. `count` is not unique: it
            stops at its maximum.
    """

    count: int
    newest: str | None
    seconds_since_end: float | None


def requested_tags(capture: str, purpose: str) -> dict[str, str]:
    """Return the tags of a run that a sensor requests.

    After a failure the sensor requests the work that is left, with a growing pause. A retry by the
    instance (`run_retries`) would repeat the whole run at once.
    """
    return {CAPTURE_TAG: capture, PURPOSE_TAG: purpose, MAX_RETRIES_TAG: "0"}


def find_unfinished(
    instance: dg.DagsterInstance, work: PooledStep, keys: Collection[dg.AssetKey]
) -> DagsterRun | None:
    """Find a queued or running run that materialises the assets; see `unfinished_runs`."""
    found = next(unfinished_runs(instance, work, keys), None)
    return None if found is None else found.dagster_run


def unfinished_runs(
    instance: dg.DagsterInstance, work: PooledStep, keys: Collection[dg.AssetKey]
) -> Iterator[RunRecord]:
    """Yield the queued and running runs that materialise the assets, the newest first.

    Runs started by "Materialize" in the UI belong to Dagster's implicit job, and a user may have
    jobs too. These runs lack our tags. A run does not count if its step for the assets has ended,
    although other steps may still run, or if a dead daemon left the run in its queue.

    Args:
        work: the step that materialises the assets.
    """
    for record in instance.get_run_records(RunsFilter(statuses=UNFINISHED)):
        if is_left_over(instance, record):
            continue
        if is_materialising(instance, record.dagster_run, work, keys):
            yield record


def find_unfinished_of_job(instance: dg.DagsterInstance, job: str) -> DagsterRun | None:
    """Find a queued or running run of a job."""
    records = instance.get_run_records(RunsFilter(job_name=job, statuses=UNFINISHED))
    runs = (each.dagster_run for each in records if not is_left_over(instance, each))
    return next(runs, None)


def is_materialising(
    instance: dg.DagsterInstance, run: DagsterRun, work: PooledStep, keys: Collection[dg.AssetKey]
) -> bool:
    """Return whether an unfinished run of any job materialises one of the assets of a step.

    Dagster stores the selection of assets of a part of a job only. A run of a whole job of the user
    counts from the start of the step: other steps before it may take long.
    """
    if run.job_name == work.job:
        return True
    if run.asset_selection or run.asset_check_selection:
        is_selected = not frozenset(keys).isdisjoint(run.asset_selection or ())
        return is_selected and not run_has_ended(instance, run, work.step)
    if work.pool not in pools_of(run) or run.status == DagsterRunStatus.QUEUED:
        return False
    stats = instance.event_log_storage.get_step_stats_for_run(run.run_id, [work.step])
    return bool(stats) and all(each.status not in _ENDED for each in stats)


def pools_of(run: DagsterRun) -> Set[str]:
    """Return the pools of a run's steps."""
    wanted = run.run_op_concurrency
    return frozenset() if wanted is None else wanted.all_pools or frozenset()


def run_has_ended(instance: dg.DagsterInstance, run: DagsterRun, step: str) -> bool:
    """Return whether a step of a running run has succeeded, has failed or was skipped."""
    if run.status == DagsterRunStatus.QUEUED:
        return False
    stats = instance.event_log_storage.get_step_stats_for_run(run.run_id, [step])
    return any(each.status in _ENDED for each in stats)


def is_left_over(instance: dg.DagsterInstance, record: RunRecord) -> bool:
    """Return whether a run that has not begun will not begin."""
    status = record.dagster_run.status
    if status == DagsterRunStatus.QUEUED:
        return not _has_queue_daemon(instance)
    if status == DagsterRunStatus.NOT_STARTED:
        return _age(record) > START_SECONDS
    if status == DagsterRunStatus.STARTING or is_canceled_before_start(
        instance, record.dagster_run
    ):
        limit = max(START_SECONDS, instance.run_monitoring_start_timeout_seconds)
        return _age(record) > limit
    return False


def is_canceled_before_start(instance: dg.DagsterInstance, run: DagsterRun) -> bool:
    """Return whether a person has terminated a run that no process executes yet.

    Dagster sets the status also if there is no process to signal.
    """
    return run.status == DagsterRunStatus.CANCELING and (
        not run.tags.get(PROCESS_TAG) or is_claim_inherited(instance, run)
    )


def is_claim_inherited(instance: dg.DagsterInstance, run: DagsterRun) -> bool:
    """Return whether a run has the process tag of the run that it repeats, before its own start."""
    if run.parent_run_id is None or last_heartbeat(run) is not None:
        return False
    parent = instance.get_run_by_id(run.parent_run_id)
    return parent is not None and parent.tags.get(PROCESS_TAG) == run.tags.get(PROCESS_TAG)


def is_started(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Return whether a run is unfinished in Dagster. After its end another run may start."""
    return status_of(instance, run_id) is DagsterRunStatus.STARTED


def status_of(instance: dg.DagsterInstance, run_id: str) -> DagsterRunStatus | None:
    """Return the status of a run; None if the run was deleted."""
    run = instance.get_run_by_id(run_id)
    return None if run is None else run.status


def is_requested_by(run: DagsterRun, purpose: str) -> bool:
    """Return whether a sensor has requested a run.

    A person may execute such a run again much later. Dagster copies the tags of the run.
    """
    return run.tags.get(PURPOSE_TAG) == purpose and run.parent_run_id is None


def attempts_for(
    instance: dg.DagsterInstance, capture: str, purpose: str, tags: dict[str, str]
) -> Attempts:
    """Count the earlier runs with the same purpose and tags, successful or not."""
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
    """Return the time since the end of the newest run; None if no run has ended."""
    ends = [record.end_time for record in records if record.end_time is not None]
    # If the clock was set back, the greatest end is not that of the newest run.
    return min(map(seconds_since, ends)) if ends else None


def seconds_since(timestamp: float) -> float:
    """Return the age of a record; infinite for a record from before the clock was set back.

    Otherwise the record would be young for as long as the clock was ahead.
    """
    age = time.time() - timestamp
    return max(0.0, age) if age > -CLOCK_DIFFERENCE_SECONDS else math.inf


def _has_queue_daemon(instance: dg.DagsterInstance) -> bool:
    beat = instance.get_daemon_heartbeats().get(_QUEUE_DAEMON)
    return beat is not None and time.time() - beat.timestamp < DAEMON_SILENT_SECONDS


def _age(record: RunRecord) -> float:
    changed = max(record.create_timestamp, record.update_timestamp)
    return time.time() - changed.timestamp()
