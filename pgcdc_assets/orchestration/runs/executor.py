"""The executor of a capture's runs: all steps in one process, under a claim of the run.

A claim by the steps would come too late, because a step may wait for its pool before it begins. For
the wait, see `pool_waits.py`: it is why the plan is not executed by Dagster's in-process executor.

Dagster raises the interrupt of a signal wherever a step executes code of ours. Between two events
of a step, Dagster would note the signal, and raise an error with a stack trace in its own code. The
executor notes these signals itself, and the step raises its own error.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import dagster as dg
from dagster._core.events import EngineEventData
from dagster._core.execution.api import ExecuteRunWithPlanIterable
from dagster._core.execution.context.system import PlanExecutionContext, PlanOrchestrationContext
from dagster._core.execution.context_creation_job import PlanExecutionContextManager
from dagster._core.execution.plan.execute_plan import inner_plan_execution_iterator
from dagster._core.execution.plan.plan import ExecutionPlan
from dagster._core.execution.retries import RetryMode
from dagster._core.execution.step_dependency_config import StepDependencyConfig
from dagster._core.executor.in_process import InProcessExecutor

from pgcdc_assets.orchestration.runs.claims import claimed_run, interrupt_steps, is_interrupted
from pgcdc_assets.orchestration.runs.pool_waits import PoolClaims, PoolWait


class _ClaimingExecutor(InProcessExecutor):
    """Executor that claims the run, and waits for pools without processor time."""

    def __init__(
        self,
        wait: PoolWait,
        retries: RetryMode = RetryMode.ENABLED,
        step_dependency_config: StepDependencyConfig | None = None,
        marker_to_close: str | None = None,
    ) -> None:
        config = step_dependency_config or StepDependencyConfig.default()
        super().__init__(retries, config, marker_to_close)
        self._wait = wait

    def execute(
        self, plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan
    ) -> Iterator[dg.DagsterEvent]:
        with claimed_run(plan_context.instance, plan_context.dagster_run):
            for event in self._execute(plan_context, execution_plan):
                _note_interrupts()
                yield event

    def _execute(
        self, plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan
    ) -> Iterator[dg.DagsterEvent]:
        steps = EngineEventData.in_process(os.getpid(), execution_plan.step_keys_to_execute)
        message = f"Executing steps in process (pid: {os.getpid()})"
        yield dg.DagsterEvent.engine_event(plan_context, message, event_specific_data=steps)
        yield from ExecuteRunWithPlanIterable(
            execution_plan=plan_context.execution_plan,
            iterator=partial(_iterate, self._wait),
            execution_context_manager=PlanExecutionContextManager(
                job=plan_context.job,
                retry_mode=plan_context.retry_mode,
                execution_plan=plan_context.execution_plan,
                run_config=plan_context.run_config,
                dagster_run=plan_context.dagster_run,
                instance=plan_context.instance,
                raise_on_error=plan_context.raise_on_error,
                output_capture=plan_context.output_capture,
                step_dependency_config=self.step_dependency_config,
            ),
        )


def _iterate(
    wait: PoolWait, job_context: PlanExecutionContext, execution_plan: ExecutionPlan
) -> Iterator[dg.DagsterEvent]:
    with PoolClaims(job_context.instance, job_context.dagster_run, wait) as claims:
        yield from inner_plan_execution_iterator(job_context, execution_plan, claims)


def _note_interrupts() -> None:
    """Replace Dagster's handlers of signals, which Dagster restores at the end of the plan."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _note_interrupt)
        signal.signal(signal.SIGTERM, _note_interrupt)
        # Dagster's handler has noted a signal before the first event.
        is_interrupted()


def _note_interrupt(number: int, frame: FrameType | None) -> None:
    interrupt_steps()


def _create(init_context: Any) -> dg.Executor:
    create = dg.in_process_executor.executor_creation_fn
    assert create is not None
    plain = create(init_context)
    assert isinstance(plain, InProcessExecutor)
    return _ClaimingExecutor(
        PoolWait(), plain.retries, plain.step_dependency_config, plain.marker_to_close
    )


run_executor = dg.ExecutorDefinition(
    name="pgcdc_in_process",
    config_schema=dg.in_process_executor.config_schema,  # type: ignore[arg-type]
    executor_creation_fn=_create,
    description="Executes all steps in the process of the run, under a claim of the run.",
)


def build_command_executor(wait: PoolWait) -> dg.ExecutorDefinition:
    """Build the executor of a command, which decides how its run waits for pools."""
    return dg.ExecutorDefinition(
        name="pgcdc_command", executor_creation_fn=lambda context: _ClaimingExecutor(wait)
    )
