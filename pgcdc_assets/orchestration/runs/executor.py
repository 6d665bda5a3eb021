"""The executor of a capture's runs: Dagster's in-process executor, under a claim of the run.

A claim by the steps would come too late, because a step may wait for its pool before it begins.

Dagster raises the interrupt of a signal wherever a step executes code of ours. Between two events
of a step, Dagster would note the signal, and raise an error with a stack trace in its own code. The
executor notes these signals itself, and the step raises its own error.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import dagster as dg
from dagster._core.execution.context.system import PlanOrchestrationContext
from dagster._core.execution.plan.plan import ExecutionPlan
from dagster._core.execution.retries import RetryMode
from dagster._core.execution.step_dependency_config import StepDependencyConfig
from dagster._utils.interrupts import pop_captured_interrupt

from pgcdc_assets.orchestration.runs.claims import claimed_run, interrupt_steps
from pgcdc_assets.orchestration.runs.pool_waits import claim_pool


class _ClaimingExecutor(dg.Executor):
    """Executor that claims the run, and delegates the plan to another executor."""

    def __init__(self, inner: dg.Executor) -> None:
        self._inner = inner

    @property
    def retries(self) -> RetryMode:
        return self._inner.retries

    @property
    def step_dependency_config(self) -> StepDependencyConfig:
        return self._inner.step_dependency_config

    def execute(
        self, plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan
    ) -> Iterator[dg.DagsterEvent]:
        with claimed_run(plan_context.instance, plan_context.dagster_run):
            yield from claim_pool(plan_context, execution_plan)
            for event in self._inner.execute(plan_context, execution_plan):
                _note_interrupts()
                yield event


def _note_interrupts() -> None:
    """Replace Dagster's handlers of signals, which Dagster restores at the end of the plan."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _note_interrupt)
        signal.signal(signal.SIGTERM, _note_interrupt)
        # Dagster's handler has noted a signal before the first event.
        if pop_captured_interrupt():
            interrupt_steps()


def _note_interrupt(number: int, frame: FrameType | None) -> None:
    interrupt_steps()


def _create(init_context: Any) -> dg.Executor:
    create = dg.in_process_executor.executor_creation_fn
    assert create is not None
    return _ClaimingExecutor(create(init_context))


run_executor = dg.ExecutorDefinition(
    name="pgcdc_in_process",
    config_schema=dg.in_process_executor.config_schema,  # type: ignore[arg-type]
    executor_creation_fn=_create,
    description="Executes all steps in the process of the run, under a claim of the run.",
)
