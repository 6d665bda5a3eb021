"""A schedule requests no run while one of its runs has not ended."""

from __future__ import annotations

import datetime as dt

import dagster as dg
import pytest

from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG

CAPTURES = [CdcCapture(name, "pub", (CdcTable("shop", "orders"),)) for name in ("shop", "other")]


@pytest.fixture
def repository() -> dg.RepositoryDefinition:
    merged = dg.Definitions.merge(*map(build_cdc_definitions, CAPTURES))
    repository = merged.get_repository_def()
    assert isinstance(repository, dg.RepositoryDefinition)
    return repository


def create_run(
    instance: dg.DagsterInstance,
    repository: dg.RepositoryDefinition,
    job: str,
    status: dg.DagsterRunStatus,
) -> dg.DagsterRun:
    return instance.create_run_for_job(repository.get_job(job), status=status)


@pytest.mark.parametrize("job", ["upkeep", "checks"])
def test_a_run_that_outlasts_the_interval_is_not_joined_by_another_one(
    instance: dg.DagsterInstance, repository: dg.RepositoryDefinition, job: str
) -> None:
    name = f"shop_{job}"

    def evaluate() -> dg.ScheduleExecutionData:
        with dg.build_schedule_context(
            instance, scheduled_execution_time=dt.datetime.now(dt.UTC), repository_def=repository
        ) as context:
            return repository.get_schedule_def(name).evaluate_tick(context)

    create_run(instance, repository, f"other_{job}", dg.DagsterRunStatus.STARTED)
    ended = create_run(instance, repository, name, dg.DagsterRunStatus.STARTED)
    instance.report_run_failed(ended)
    (request,) = evaluate().run_requests or []
    assert request.tags[CAPTURE_TAG] == "shop"
    assert request.tags["dagster/schedule_name"] == name

    running = create_run(instance, repository, name, dg.DagsterRunStatus.STARTED)
    skipped = evaluate()
    assert not skipped.run_requests
    assert skipped.skip_message == f"Run {running.run_id} of {name} has not ended"

    instance.report_run_canceled(running)
    assert evaluate().run_requests
