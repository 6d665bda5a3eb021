"""The waits of a run for the pools of its steps.

While a pool is used, Dagster's in-process executor asks without a pause, which needs a whole
processor: `interval_to_next_pending_claim_check` of `InstanceConcurrencyContext` is never above 0
(Dagster 1.13). It asks the storage at intervals that grow to 15 s, and does not notice a signal
before the step begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import dagster as dg
from dagster import DagsterRun
from dagster._core.execution.plan.instance_concurrency_context import InstanceConcurrencyContext

from pgcdc_assets.errors import TransientError
from pgcdc_assets.orchestration.runs.claims import RunInterrupted, is_interrupted
from pgcdc_assets.orchestration.runs.records import is_started

_POLL_SECONDS = 0.2
_POLLS_PER_STATUS = 10


@dataclass(frozen=True)
class PoolWait:
    """The way in which a run waits for a pool.

    Attributes:
        limit_seconds: longest wait of a step.
        release: function that frees the pools of dead runs. A wait calls it at its start, and then
            every two seconds.
        say: function that gets one sentence about each wait.
    """

    limit_seconds: float = float("inf")
    release: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda sentence: None


class PoolClaims(InstanceConcurrencyContext):
    """The claims of a run, which are repeated five times a second while a pool is used."""

    def __init__(self, instance: dg.DagsterInstance, run: DagsterRun, wait: PoolWait) -> None:
        super().__init__(instance, run)
        self._wait = wait
        self._polls = 0
        self._began: float | None = None
        self._is_announced = False
        self._pool_by_step: dict[str, str] = {}

    def claim(self, concurrency_key: str, step_key: str, step_priority: int = 0) -> bool:
        if step_key in self._pending_timeouts:
            # Dagster's pause is over.
            self._pending_timeouts[step_key] = 0.0
        self._pool_by_step[step_key] = concurrency_key
        is_claimed = super().claim(concurrency_key, step_key, step_priority)
        if is_claimed:
            self._began, self._is_announced, self._polls = None, False, 0
        return is_claimed

    def interval_to_next_pending_claim_check(self) -> float:
        """Return the seconds until the next claim.

        Raises:
            RunInterrupted: a signal has arrived, or the run is not running any more.
            TransientError: the wait has reached its limit.
        """
        if not self._pending_claims:
            return 0.0
        is_checked = self._polls % _POLLS_PER_STATUS == 0
        self._polls += 1
        if is_interrupted() or (is_checked and not is_started(self._instance, self._run_id)):
            raise RunInterrupted
        now = time.monotonic()
        if self._began is None:
            self._began = now
        elif not self._is_announced:
            # The pool of a dead run was freed before, at the start of the wait.
            self._is_announced = True
            pools, runs = self._describe_pools()
            self._wait.say(f"Waiting for pool {pools}, which is used by {runs}")
        if now - self._began > self._wait.limit_seconds:
            raise self._limit_error()
        if is_checked:
            self._wait.release()
        return _POLL_SECONDS

    def _limit_error(self) -> TransientError:
        pools, runs = self._describe_pools()
        return TransientError(
            reason=f"Pool {pools} is used by {runs}, and was not free within "
            f"{self._wait.limit_seconds:g} s. Run the command again."
        )

    def _describe_pools(self) -> tuple[str, str]:
        """Return the awaited pools and the runs that use them."""
        pools = sorted({self._pool_by_step[step] for step in self._pending_claims})
        # One query for each pool: older releases of Dagster 1.13 have none for several pools.
        infos = map(self._instance.event_log_storage.get_concurrency_info, pools)
        holders = sorted({run_id for info in infos for run_id in info.active_run_ids})
        runs = ", ".join(map(self._describe, holders)) or "another run"
        return ", ".join(pools), runs

    def _describe(self, run_id: str) -> str:
        run = self._instance.get_run_by_id(run_id)
        return f"run {run_id}" if run is None else f"run {run_id} of {run.job_name}"
