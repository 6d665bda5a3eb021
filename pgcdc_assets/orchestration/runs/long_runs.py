"""Long runs: after the requested windows, a run continues with further windows.

The start of a run needs seconds of processor time for a process, its imports and its records in
Dagster's storage. A run for every window would cost more than the changes. So a sensor sets, by a
tag, how long a requested run may continue. Other runs, such as a materialisation in the UI or by
`pgcdc sync`, end after the requested windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import dagster as dg
from dagster import DagsterRunStatus, RunRecord, RunsFilter

from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress
from pgcdc_assets.policies import WindowPolicy

SECONDS_TAG = "pgcdc/run_seconds"

_LONGEST_POLL_SECONDS = 0.5
_POLLS_PER_WINDOW = 10
# Without work, a run ends this long after `max_age_seconds`, at which a window would be opened.
IDLE_SECONDS = 10.0
# An instance may limit the number of its runs. A run that is queued for longer than this time may
# wait for the end of this run.
QUEUED_SECONDS = 15.0

Found = TypeVar("Found")


def may_continue(policy: WindowPolicy, progress: SyncProgress | None) -> dict[str, str]:
    """Return the tag for a run that a sensor requests; no tag in a one-shot run."""
    return {} if progress is not None else {SECONDS_TAG: f"{policy.run_seconds:g}"}


def poll_seconds(policy: WindowPolicy) -> float:
    """Return the interval at which a run looks for its next work."""
    return max(min(policy.max_age_seconds / _POLLS_PER_WINDOW, _LONGEST_POLL_SECONDS), 0.1)


@dataclass
class LongRun:
    """The decision whether a run continues.

    Attributes:
        pool: the pool of the run's step. The run ends if another run waits for the pool.
        idle_seconds: the run ends after this time without work.
        poll_seconds: interval at which the run looks for work.
    """

    instance: dg.DagsterInstance
    run_id: str
    pool: str
    seconds: float
    idle_seconds: float
    poll_seconds: float = _LONGEST_POLL_SECONDS
    _began: float = field(default_factory=time.monotonic)
    _idle_since: float = 0.0

    @classmethod
    def of(cls, context: dg.AssetExecutionContext, pool: str, policy: WindowPolicy) -> LongRun:
        """Read the sensor's limits from a run's tags."""
        seconds = float(context.run.tags.get(SECONDS_TAG, "0"))
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
        self.seconds = 0.0

    def find(self, look: Callable[[], Found | None]) -> Found | None:
        """Wait for the next work; return None at the end of the run."""
        self.stay()
        while time.monotonic() < self._end():
            if not self._is_running() or self._is_awaited():
                break
            found = look()
            if found is not None:
                return found
            time.sleep(self.poll_seconds)
        return None

    def _end(self) -> float:
        return min(self._began + self.seconds, self._idle_since + self.idle_seconds)

    def _is_running(self) -> bool:
        """Return whether the run is unfinished in Dagster. After its end another run may start."""
        run = self.instance.get_run_by_id(self.run_id)
        return run is not None and run.status == DagsterRunStatus.STARTED

    def _is_awaited(self) -> bool:
        """Return whether another run waits for the pool, or has been queued for a long time."""
        storage = self.instance.event_log_storage
        if storage.supports_global_concurrency_limits:
            steps = storage.get_concurrency_info(self.pool).pending_steps
            if any(step.run_id != self.run_id for step in steps):
                return True
        queued = self.instance.get_run_records(RunsFilter(statuses=[DagsterRunStatus.QUEUED]))
        return any(self._is_waiting(record) for record in queued)

    def _is_waiting(self, queued: RunRecord) -> bool:
        wanted = queued.dagster_run.run_op_concurrency
        if wanted is not None and self.pool in (wanted.all_pools or ()):
            return True
        return time.time() - queued.create_timestamp.timestamp() > QUEUED_SECONDS
