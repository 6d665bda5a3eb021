"""The part of a job that a sensor requested."""

from __future__ import annotations

import dagster as dg


def requested_job(
    repository: dg.RepositoryDefinition, job_name: str, request: dg.RunRequest
) -> dg.JobDefinition:
    """Return the part of a job that a sensor requested."""
    job = repository.get_job(job_name)
    if not request.asset_selection:
        return job
    # The asset selection of execute_in_process adds every check of the assets.
    return job.get_subset(
        asset_selection=frozenset(request.asset_selection),
        asset_check_selection=frozenset(request.asset_check_keys or ()),
    )
