"""The wait of a run for the pool of its step.

Dagster's in-process executor asks for a used pool without a pause, which needs a whole processor,
and asks the storage at intervals that grow to 15 s. It also does not notice a signal before the
step begins. So the executor claims the pool itself before it executes the plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

import dagster as dg
from dagster._core.events import EngineEventData
from dagster._core.execution.context.system import PlanOrchestrationContext
from dagster._core.execution.plan.plan import ExecutionPlan
from dagster._core.instance.config import PoolGranularity
from dagster._core.storage.tags import PRIORITY_TAG
from dagster._utils.interrupts import pop_captured_interrupt

from pgcdc_assets.orchestration.runs.claims import RunInterrupted, interrupt_steps
from pgcdc_assets.orchestration.runs.records import is_started

_POLL_SECONDS = 0.2
_POLLS_PER_STATUS = 10


def claim_pool(
    plan_context: PlanOrchestrationContext, plan: ExecutionPlan
) -> Iterator[dg.DagsterEvent]:
    """Wait until the pool of a first step admits this run; Dagster's own claim follows.

    A plan with several first steps in pools does not wait here, because two such runs could wait
    for each other.

    Raises:
        RunInterrupted: a signal has arrived, or the run is not running any more.
    """
    instance, run_id = plan_context.instance, plan_context.run_id
    storage = instance.event_log_storage
    first = next(iter(plan.get_steps_to_execute_by_level()), [])
    limited = [
        (each, each.pool) for each in first if each.pool and _is_limited(instance, each.pool)
    ]
    if len(limited) != 1:
        return
    step, pool = limited[0]
    priority = _priority(plan_context.dagster_run.tags) + _priority(step.tags)
    polls = 0
    try:
        while not storage.claim_concurrency_slot(pool, run_id, step.key, priority).is_claimed:
            if polls == 0:
                message = f"The run waits for pool {pool}, which another run uses."
                yield dg.DagsterEvent.engine_event(plan_context, message, EngineEventData())
            if _is_interrupted() or (
                polls % _POLLS_PER_STATUS == 0 and not is_started(instance, run_id)
            ):
                raise RunInterrupted
            polls += 1
            time.sleep(_POLL_SECONDS)
    except BaseException:
        storage.free_concurrency_slot_for_step(run_id, step.key)
        raise


def _is_limited(instance: dg.DagsterInstance, pool: str) -> bool:
    """Return whether Dagster limits the steps in a pool, and record a limit of the instance."""
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return False
    config = storage.get_pool_config()
    if config.pool_granularity is PoolGranularity.RUN:
        return False
    if pool in {limit.name for limit in storage.get_pool_limits()}:
        return True
    return config.default_pool_limit is not None and (
        storage.initialize_concurrency_limit_to_default(pool)
    )


def _priority(tags: Mapping[str, str] | None) -> int:
    """Return a priority as Dagster reads it: 0 if the tag is not a number."""
    try:
        return int((tags or {}).get(PRIORITY_TAG, "0"))
    except ValueError:
        return 0


def _is_interrupted() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and pop_captured_interrupt():
        interrupt_steps()
        return True
    return False
