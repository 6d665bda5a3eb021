"""The waits of a run for the pools of its steps.

While a pool is used, Dagster's in-process executor asks without a pause, which needs a whole
processor: `interval_to_next_pending_claim_check` of `InstanceConcurrencyContext` is never above 0
(Dagster 1.13). It asks the storage at intervals that grow to 15 s, and does not notice a signal
before the step begins.
"""

from __future__ import annotations

from dagster._core.execution.plan.instance_concurrency_context import InstanceConcurrencyContext

from pgcdc_assets.orchestration.runs.claims import RunInterrupted, is_interrupted
from pgcdc_assets.orchestration.runs.records import is_started

_POLL_SECONDS = 0.2
_POLLS_PER_STATUS = 10


class PoolClaims(InstanceConcurrencyContext):
    """The claims of a run, which are repeated five times a second while a pool is used."""

    _polls = 0

    def claim(self, concurrency_key: str, step_key: str, step_priority: int = 0) -> bool:
        if step_key in self._pending_timeouts:
            # Dagster's pause is over.
            self._pending_timeouts[step_key] = 0.0
        return super().claim(concurrency_key, step_key, step_priority)

    def interval_to_next_pending_claim_check(self) -> float:
        """Return the seconds until the next claim.

        Raises:
            RunInterrupted: a signal has arrived, or the run is not running any more.
        """
        if not self._pending_claims:
            return 0.0
        is_checked = self._polls % _POLLS_PER_STATUS == 0
        self._polls += 1
        if is_interrupted() or (is_checked and not is_started(self._instance, self._run_id)):
            raise RunInterrupted
        return _POLL_SECONDS
