"""Runs of jobs in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg


def run_in_process(
    job: dg.JobDefinition,
    instance: dg.DagsterInstance,
    tags: Mapping[str, str],
    *,
    run_id: str | None = None,
    ops: Mapping[str, Any] | None = None,
) -> dg.ExecuteInProcessResult:
    """Run a job, and keep its log from the terminal.

    Args:
        job: the job.
        instance: the instance that records the run.
        tags: the tags of the run; see `runs/claims.py`.
        run_id: the id of the run; None: a new one.
        ops: the configuration of the job's ops.

    Returns:
        The result, which may be a failure: see `error_of_run`.
    """
    config: dict[str, Any] = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    if ops is not None:
        config["ops"] = ops
    return job.execute_in_process(
        run_config=config, instance=instance, run_id=run_id, tags=dict(tags), raise_on_error=False
    )
