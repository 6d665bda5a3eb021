"""Long runs: after the requested windows, a run continues with further windows.

The start of a run needs seconds of processor time for a process, its imports and its records in
Dagster's storage. A run for every window would cost more than the changes. So a sensor sets, by a
tag, how long a requested run may continue. Other runs, such as a materialisation in the UI or a
repeated run, end after the requested windows. A capture of `pgcdc sync` ends at the barrier.

At the end of its time a run hands over: the sensor requests a successor, whose process starts and
waits for the pool, and the run continues until then. If Dagster would not start the successor while
the pool is used (`hands_over`), the run ends at its time, and the sensor requests the next run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import dagster as dg
from dagster import DagsterRun, DagsterRunStatus, RunRecord, RunsFilter
from dagster._core.instance.config import PoolGranularity

from pgcdc_assets.orchestration.runs.claims import RunInterrupted
from pgcdc_assets.orchestration.runs.queue_limits import wait_for_end
from pgcdc_assets.orchestration.runs.records import pools_of, status_of
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress
from pgcdc_assets.settings.policies import WindowPolicy

SECONDS_TAG = "pgcdc/run_seconds"

_LONGEST_POLL_SECONDS = 0.5
_POLLS_PER_WINDOW = 10
# Without work, a run ends this long after `max_age_seconds`, at which a window would be opened.
IDLE_SECONDS = 10.0
# An instance may limit the number of its runs. A run ends for another one that is queued for longer
# than this time because of such a limit.
QUEUED_SECONDS = 15.0
# Dagster sets the status of a terminated run, and then sends the signal.
SIGNAL_SECONDS = 1.0
# A run that waits for its successor ends this long after its time.
HANDOVER_SECONDS = 60.0

Found = TypeVar("Found")


def may_continue(
    policy: WindowPolicy, progress: SyncProgress | None, at_most: float = math.inf
) -> dict[str, str]:
    """Return the tag for a run that a sensor requests; no tag in a one-shot run.

    Args:
        at_most: the seconds after which the sensor has to request another run.
    """
    seconds = min(policy.run_seconds, at_most)
    return {} if progress is not None else {SECONDS_TAG: f"{seconds:g}"}


def _seconds_of(run: DagsterRun) -> float:
    """Return for how long a run may continue; 0 if no sensor has requested the run.

    Dagster copies the tag to a run that a person executes again, perhaps for some of the tables.
    """
    return float(run.tags.get(SECONDS_TAG, "0")) if run.parent_run_id is None else 0.0


def hands_over(instance: dg.DagsterInstance, pool: str) -> bool:
    """Return whether Dagster admits one run to a pool, and starts the next one before its end."""
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return False
    config = storage.get_pool_config()
    if config.pool_granularity is PoolGranularity.RUN or not config.op_granularity_run_buffer:
        return False
    limits = {limit.name: limit.limit for limit in storage.get_pool_limits()}
    return limits.get(pool, config.default_pool_limit) == 1


def find_outgoing(
    instance: dg.DagsterInstance, unfinished: Iterable[RunRecord], pool: str
) -> DagsterRun | None:
    """Return the run that needs a successor now; None if there is none, or if it has one.

    Args:
        unfinished: the queued and running runs of a step that uses the pool.
    """
    records = list(unfinished)
    if len(records) != 1:
        return None
    run, began = records[0].dagster_run, records[0].start_time
    seconds = _seconds_of(run)
    if not seconds or began is None or run.status != DagsterRunStatus.STARTED:
        return None
    return run if time.time() >= began + seconds and hands_over(instance, pool) else None


def poll_seconds(policy: WindowPolicy) -> float:
    """Return the interval at which a run looks for its next work."""
    return max(min(policy.max_age_seconds / _POLLS_PER_WINDOW, _LONGEST_POLL_SECONDS), 0.1)


@dataclass
class LongRun:
    """The decision whether a run continues.

    A run whose successor waits looks for work once more, so that the successor finds little to do.

    Attributes:
        pool: the pool of the run's step. The run ends if another run waits for the pool.
        seconds: the time of the run.
        idle_seconds: the run ends after this time without work.
        poll_seconds: interval at which the run looks for work.
        is_ending: the run's successor waits, and what `find` returned last is the last work.
    """

    instance: dg.DagsterInstance
    run_id: str
    pool: str
    seconds: float
    idle_seconds: float
    poll_seconds: float = _LONGEST_POLL_SECONDS
    is_ending: bool = False
    _began: float = field(default_factory=time.monotonic)
    _idle_since: float = 0.0

    def __post_init__(self) -> None:
        self._hands_over = self.seconds > 0 and hands_over(self.instance, self.pool)

    @classmethod
    def of(cls, context: dg.AssetExecutionContext, pool: str, policy: WindowPolicy) -> LongRun:
        """Read the sensor's limits from a run's tags."""
        seconds = _seconds_of(context.run)
        idle_seconds = policy.max_age_seconds + IDLE_SECONDS
        return cls(
            context.instance,
            context.run.run_id,
            pool,
            seconds,
            idle_seconds,
            poll_seconds(policy),
        )

    def stay(self) -> None:
        """Do not count the time until now as time without work."""
        self._idle_since = time.monotonic()

    def stop(self) -> None:
        """End the run; other runs process the next windows."""
        self.seconds, self._hands_over = 0.0, False

    def find(self, look: Callable[[], Found | None]) -> Found | None:
        """Wait for the next work; return None at the end of the run.

        Raises:
            RunInterrupted: a person has terminated the run.
        """
        self.stay()
        while not self.is_ending and time.monotonic() < self._end():
            status = status_of(self.instance, self.run_id)
            if status is DagsterRunStatus.CANCELING:
                # The signal would otherwise arrive in Dagster's code, with a stack trace.
                time.sleep(SIGNAL_SECONDS)
                raise RunInterrupted
            if status is not DagsterRunStatus.STARTED:
                break
            waits = self._has_waiting_step()
            self.is_ending = waits and self._hands_over
            if not self.is_ending and (waits or self._has_queued_run()):
                break
            found = look()
            if found is not None:
                return found
            if not self.is_ending:
                time.sleep(self.poll_seconds)
        return None

    def _end(self) -> float:
        seconds = self.seconds + HANDOVER_SECONDS if self._hands_over else self.seconds
        return min(self._began + seconds, self._idle_since + self.idle_seconds)

    def _has_waiting_step(self) -> bool:
        """Return whether the step of another run waits for the pool."""
        storage = self.instance.event_log_storage
        if not storage.supports_global_concurrency_limits:
            return False
        steps = storage.get_concurrency_info(self.pool).pending_steps
        return any(step.run_id != self.run_id for step in steps)

    def _has_queued_run(self) -> bool:
        """Return whether a queued run may wait for the end of this run."""
        queued = self.instance.get_run_records(RunsFilter(statuses=[DagsterRunStatus.QUEUED]))
        if not self._hands_over and any(self.pool in pools_of(r.dagster_run) for r in queued):
            return True
        latest = time.time() - QUEUED_SECONDS
        old = [each.dagster_run for each in queued if each.create_timestamp.timestamp() < latest]
        return wait_for_end(self.instance, self.run_id, old)
