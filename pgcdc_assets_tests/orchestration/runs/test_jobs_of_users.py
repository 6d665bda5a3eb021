"""Runs of a user's own jobs over the assets of a capture, which no sensor has requested.

Dagster stores no selection of assets with such a run, and the run has no tag of this package.
"""

from __future__ import annotations

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs.claims import PROCESS_TAG
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.orchestration.runs.test_records import dead_process, hold, holders
from pgcdc_assets_tests.orchestration.runs.test_snapshot_runs import A, B, merge_both, merged

pytestmark = pytest.mark.postgres

RAW, SNAPSHOT = (dg.AssetKey([NAME, layer]) for layer in ("raw", "snapshot"))
WINDOW = {"dagster/partition": "0001-0000000000000001-0000000000000002"}


def start(orchestrated: Orchestrated, tags: dict[str, str], *keys: dg.AssetKey) -> dg.DagsterRun:
    """Start a run of a user's job over some assets."""

    @dg.asset(deps=keys)
    def summary() -> None: ...

    job = dg.define_asset_job("nightly", selection=dg.AssetSelection.assets(*keys, summary))
    own = dg.Definitions(assets=[summary], jobs=[job])
    definitions = dg.Definitions.merge(orchestrated.location.definitions, own)
    run = orchestrated.instance.create_run_for_job(
        definitions.resolve_job_def("nightly"), tags=tags
    )
    assert run.asset_selection is None
    report(orchestrated, run, dg.DagsterEventType.RUN_START)
    return run


def report(
    orchestrated: Orchestrated,
    run: dg.DagsterRun,
    kind: dg.DagsterEventType,
    step: str | None = None,
) -> None:
    event = dg.DagsterEvent(kind.value, job_name=run.job_name, step_key=step)
    orchestrated.instance.report_dagster_event(event, run.run_id)


@pytest.mark.parametrize(
    ("sensor", "keys"),
    [("lag", [RAW]), ("lag", [SNAPSHOT]), ("merges", [A, B]), ("merges", [RAW]), ("lag", [A])],
    ids=["capture", "snapshot", "merge", "by another sensor", "table by another sensor"],
)
def test_a_killed_run_of_a_users_job_frees_its_pool(
    orchestrated: Orchestrated, sensor: str, keys: list[dg.AssetKey]
) -> None:
    names = Names.of(orchestrated.capture)
    pools = {RAW: names.slot_pool, SNAPSHOT: names.snapshot_pool}
    pool = pools.get(keys[0], names.merge_pool)
    run = start(orchestrated, {PROCESS_TAG: dead_process(), **WINDOW}, *keys)
    hold(orchestrated, pool, run)
    orchestrated.tick(sensor)
    found = orchestrated.instance.get_run_by_id(run.run_id)
    assert found is not None
    assert found.status is dg.DagsterRunStatus.FAILURE
    assert holders(orchestrated, pool) == set()


def test_a_run_of_a_users_job_over_other_assets_is_left_alone(orchestrated: Orchestrated) -> None:
    run = start(orchestrated, {PROCESS_TAG: dead_process()})
    for sensor in ("lag", "merges"):
        orchestrated.tick(sensor)
    found = orchestrated.instance.get_run_by_id(run.run_id)
    assert found is not None
    assert found.status is dg.DagsterRunStatus.STARTED


def test_no_window_is_opened_while_a_users_job_captures(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    orchestrated.commit("insert into b values (1, 1)")
    run = start(orchestrated, WINDOW, RAW)
    assert orchestrated.tick("lag").run_requests, "other steps of the job may run for hours"
    step = Names.of(orchestrated.capture).land_step
    report(orchestrated, run, dg.DagsterEventType.STEP_START, step)
    assert orchestrated.tick("lag").skip_message == "a capture is running"
    report(orchestrated, run, dg.DagsterEventType.STEP_SKIPPED, step)
    assert orchestrated.tick("lag").run_requests


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.sampled
def test_a_table_is_not_merged_while_a_users_job_takes_its_snapshot(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    orchestrated.copy()
    assert merged(merge_both(orchestrated)) == {A, B}
    run = start(orchestrated, {"dagster/partition": "public.a"}, SNAPSHOT)
    step = Names.of(orchestrated.capture).copy_step
    report(orchestrated, run, dg.DagsterEventType.STEP_START, step)
    assert merged(merge_both(orchestrated)) == {B}
    orchestrated.instance.report_run_canceled(run)
    assert A in merged(merge_both(orchestrated))
