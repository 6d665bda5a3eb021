"""Runs of jobs in the process of a command.

The executor is the one of the daemon's runs, with the command's own wait for pools. The executor of
Dagster's `execute_in_process` ignores signals during this wait. A command may run without a daemon,
so the wait also closes dead runs, which would hold their pools until the next sync.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.execute_in_process import core_execute_in_process
from dagster._utils.interrupts import capture_interrupts

from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs.claims import is_interrupted, new_claim, writing_heartbeat
from pgcdc_assets.orchestration.runs.dead_runs import close_dead_runs
from pgcdc_assets.orchestration.runs.executor import build_command_executor
from pgcdc_assets.orchestration.runs.pool_waits import PoolWait


def build_pool_wait(
    instance: dg.DagsterInstance,
    repository: dg.RepositoryDefinition,
    capture: str,
    limit_seconds: float = PoolWait.limit_seconds,
    *,
    say: Callable[[str], None],
) -> PoolWait:
    """Build the wait of a capture's runs, which closes dead runs of the capture.

    Args:
        limit_seconds: longest wait of a step.
        say: function that gets one sentence about each wait.
    """
    names = Names(capture)

    def release() -> None:
        keys: set[dg.AssetKey] = set()
        for job in (names.capture_job, names.snapshot_job, names.merge_job):
            keys |= repository.get_job(job).asset_layer.selected_asset_keys
        close_dead_runs(instance, capture, keys)

    return PoolWait(limit_seconds, release, say)


def run_in_process(
    job: dg.JobDefinition,
    instance: dg.DagsterInstance,
    tags: Mapping[str, str],
    *,
    wait: PoolWait | None = None,
    ops: Mapping[str, Any] | None = None,
) -> dg.ExecuteInProcessResult:
    """Run a job under a claim of this process, and keep its log from the terminal.

    Args:
        job: the job.
        instance: the instance that records the run.
        tags: further tags of the run.
        wait: how the run waits for pools.
        ops: the configuration of the job's ops.

    Returns:
        The result, which may be a failure: see `error_of_run`.

    Raises:
        KeyboardInterrupt: a signal has arrived, or a person has canceled the run.
    """
    config: dict[str, Any] = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    if ops is not None:
        config["ops"] = ops
    run_id, claim = new_claim()
    executor = build_command_executor(wait or PoolWait())
    # `execute_in_process` does the same, but with an executor of its own.
    executed = job.as_ephemeral_job(resource_defs={}, input_values={}).with_executor_def(executor)
    with capture_interrupts(), writing_heartbeat(instance, run_id):
        result = core_execute_in_process(
            job=InMemoryJob(executed),
            run_config=config,
            instance=instance,
            output_capturing_enabled=True,
            raise_on_error=False,
            run_tags={**job.run_tags, **tags, **claim},
            run_id=run_id,
            asset_selection=frozenset(),
        )
        if is_interrupted() or result.dagster_run.status is dg.DagsterRunStatus.CANCELED:
            raise KeyboardInterrupt
    return result
