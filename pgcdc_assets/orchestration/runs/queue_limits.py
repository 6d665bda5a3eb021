"""Whether queued runs wait for the end of a run, by the limits of the instance."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg
from dagster import DagsterRun, RunsFilter
from dagster._core.storage.dagster_run import IN_PROGRESS_RUN_STATUSES
from dagster._utils.tags import TagConcurrencyLimitsCounter

_UNLIMITED = -1


def wait_for_end(instance: dg.DagsterInstance, run_id: str, queued: Sequence[DagsterRun]) -> bool:
    """Return whether Dagster could start one of the queued runs if a run ended.

    The limits are those of `concurrency.runs` in `dagster.yaml`. Limits of pools do not count here.
    Without a queue of Dagster's own the limits are unknown, and each queued run may wait.

    Args:
        run_id: the run that would end.
    """
    if not queued:
        return False
    config = instance.get_concurrency_config().run_queue_config
    if config is None:
        return True
    running = instance.get_runs(RunsFilter(statuses=IN_PROGRESS_RUN_STATUSES))
    if _UNLIMITED < config.max_concurrent_runs <= len(running):
        return True
    limits = list(config.tag_concurrency_limits or ())
    others = [run for run in running if run.run_id != run_id]
    with_it, without_it = (TagConcurrencyLimitsCounter(limits, runs) for runs in (running, others))
    return any(with_it.is_blocked(run) and not without_it.is_blocked(run) for run in queued)
