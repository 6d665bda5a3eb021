"""Runs of Dagster jobs in the process of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import dagster as dg

    from pgcdc_assets.orchestration.project.code_location import CodeLocation


def run_job(
    instance: dg.DagsterInstance,
    location: CodeLocation,
    job: str,
    ops: dict[str, Any] | None = None,
) -> dg.ExecuteInProcessResult:
    """Run a job, wait for the pools of its steps, and keep its log from the terminal.

    Args:
        instance: the instance that records the run.
        location: the code location of the job.
        job: the job's name.
        ops: the configuration of the job's ops.

    Returns:
        The result, which may be a failure: see `error_of_run`.
    """
    from pgcdc_assets.orchestration.runs.claims import PROCESS_TAG, process_tag

    return location.repository.get_job(job).execute_in_process(
        run_config={
            "ops": ops or {},
            "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
        },
        instance=instance,
        tags={PROCESS_TAG: process_tag()},
        raise_on_error=False,
    )
