"""Schedules of jobs of which one run at a time is enough."""

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG, find_unfinished_of_job


def build_schedule(
    capture: str, job: dg.JobDefinition | UnresolvedAssetJobDefinition, cron: str
) -> dg.ScheduleDefinition:
    """Build the schedule of a job, which has the job's name.

    A run that outlasts the interval would otherwise be joined by more and more runs, each with its
    own process.
    """

    def request(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        found = find_unfinished_of_job(context.instance, job.name)
        if found is not None:
            return dg.SkipReason(f"Run {found.run_id} of {job.name} has not ended")
        return dg.RunRequest(tags={CAPTURE_TAG: capture})

    return dg.ScheduleDefinition(
        name=job.name,
        job=job,
        cron_schedule=cron,
        execution_fn=request,
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
