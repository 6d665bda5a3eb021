"""Downstream assets of SCD tables, evaluated as Dagster's daemon does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterEvent, DagsterEventType
from pyspark.sql import SparkSession

from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions, on_new_merges
from pgcdc_assets.orchestration.data_versions import NO_CHANGE, version_tags
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

CAPTURE = CdcCapture(NAME, "pub", (CdcTable("public", "a"), CdcTable("public", "b")))
A = dg.AssetKey([NAME, "scd1", "public", "a"])
B = dg.AssetKey([NAME, "scd1", "public", "b"])
MART = dg.AssetKey("mart")


def with_mart(
    definitions: dg.Definitions, condition: dg.AutomationCondition[Any]
) -> dg.Definitions:
    """Add an asset without partitions that depends on both tables."""

    @dg.asset(key=MART, deps=[A, B], automation_condition=condition)
    def mart() -> None: ...

    return dg.Definitions.merge(definitions, dg.Definitions(assets=[mart]))


@dataclass
class Automated:
    """Definitions with an instance, evaluated tick by tick."""

    definitions: dg.Definitions
    instance: dg.DagsterInstance
    cursor: Any = None

    def is_requested(self) -> bool:
        """Evaluate one tick, and return whether the asset was requested."""
        result = dg.evaluate_automation_conditions(
            self.definitions, self.instance, cursor=self.cursor
        )
        self.cursor = result.cursor
        return result.total_requested > 0

    def open(self, *windows: str) -> None:
        self.instance.add_dynamic_partitions(CAPTURE.windows_name, list(windows))

    def materialize(
        self, key: dg.AssetKey, window: str | None = None, version: str | None = None
    ) -> None:
        """Report the events of a merge, by default with the changes of the window."""
        tags = {} if window is None else version_tags(window if version is None else version)
        event = dg.AssetMaterialization(key, partition=window, tags=tags)
        self.instance.report_runless_asset_event(event)

    def start(self, job: dg.JobDefinition, window: str | None = None) -> dg.DagsterRun:
        """Set a run to the state of a running run."""
        tags = {} if window is None else {"dagster/partition": window}
        run = self.instance.create_run_for_job(job, tags=tags)
        self._report(run, DagsterEventType.RUN_START)
        return run

    def end(self, run: dg.DagsterRun) -> None:
        self._report(run, DagsterEventType.RUN_SUCCESS)

    def _report(self, run: dg.DagsterRun, kind: DagsterEventType) -> None:
        event = DagsterEvent(kind.value, job_name=run.job_name)
        self.instance.report_dagster_event(event, run.run_id)


@pytest.fixture
def automated() -> Iterator[Automated]:
    definitions = with_mart(build_cdc_definitions(CAPTURE), on_new_merges())
    with dg.DagsterInstance.ephemeral() as instance:
        yield Automated(definitions, instance)


def test_eager_waits_for_a_window_that_is_never_merged() -> None:
    definitions = with_mart(build_cdc_definitions(CAPTURE), dg.AutomationCondition.eager())
    with dg.DagsterInstance.ephemeral() as instance:
        automated = Automated(definitions, instance)
        automated.open("1", "2")
        automated.is_requested()
        for key in (A, B):
            automated.materialize(key, "1")
        assert not automated.is_requested()


def test_a_merge_causes_one_request_although_other_windows_wait(automated: Automated) -> None:
    automated.open("1", "2", "3")
    assert not automated.is_requested()
    automated.materialize(A, "1")
    assert not automated.is_requested(), "one table was never merged"
    automated.materialize(B, "1")
    assert automated.is_requested()
    automated.materialize(MART)
    assert not automated.is_requested()
    automated.materialize(A, "2")
    assert automated.is_requested(), "one table is enough"
    automated.materialize(MART)
    assert not automated.is_requested()
    automated.open("4")
    assert not automated.is_requested(), "an open window is not a merge"


def test_merges_without_changes_cause_no_request(automated: Automated) -> None:
    automated.open("1", "2", "3", "4")
    assert not automated.is_requested()
    for key in (A, B):
        automated.materialize(key, "1")
    assert automated.is_requested()
    automated.materialize(MART)
    for key in (A, B):
        automated.materialize(key, "2", NO_CHANGE)
    assert not automated.is_requested()
    automated.materialize(A, "3", NO_CHANGE)
    automated.materialize(B, "3")
    assert automated.is_requested(), "one of the merges has changes"
    automated.materialize(MART)
    automated.materialize(B, "3")
    assert not automated.is_requested(), "the same window was merged again"


def test_other_dependencies_cause_a_request_at_each_materialisation() -> None:
    """An externally reported event has no data version."""
    other = dg.AssetKey("other")

    @dg.asset(key=MART, deps=[A, other], automation_condition=on_new_merges())
    def mart() -> None: ...

    assets = dg.Definitions(assets=[mart, dg.AssetSpec(other)])
    definitions = dg.Definitions.merge(build_cdc_definitions(CAPTURE), assets)
    with dg.DagsterInstance.ephemeral() as instance:
        automated = Automated(definitions, instance)
        automated.open("1")
        automated.materialize(A, "1")
        automated.materialize(other)
        assert automated.is_requested()
        automated.materialize(MART)
        assert not automated.is_requested()
        automated.materialize(other)
        assert automated.is_requested()


def test_a_long_merge_run_does_not_delay_the_request(automated: Automated) -> None:
    automated.open("1", "2")
    for key in (A, B):
        automated.materialize(key, "1")
    assert automated.is_requested()
    automated.materialize(MART)
    automated.start(automated.definitions.resolve_job_def(f"{NAME}_merge"), "2")
    assert not automated.is_requested()
    automated.materialize(A, "2")
    assert automated.is_requested()


def test_a_merge_during_a_run_of_the_asset_causes_a_later_request(
    automated: Automated,
) -> None:
    automated.open("1", "2")
    for key in (A, B):
        automated.materialize(key, "1")
    assert automated.is_requested()
    job = automated.definitions.resolve_implicit_job_def_def_for_assets([MART])
    assert job is not None
    run = automated.start(job)
    automated.materialize(A, "2")
    assert not automated.is_requested(), "a run of the asset is running"
    automated.materialize(MART)
    automated.end(run)
    assert automated.is_requested()
    automated.materialize(MART)
    assert not automated.is_requested()


@pytest.mark.soak
@pytest.mark.postgres
@pytest.mark.spark
def test_merges_request_the_asset_and_idle_tables_do_not(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    location = orchestrated.location
    definitions = with_mart(location.definitions, on_new_merges())
    automated = Automated(definitions, orchestrated.instance)
    assert not automated.is_requested()
    orchestrated.sync()
    assert automated.is_requested()
    automated.materialize(MART)
    assert not automated.is_requested()
    orchestrated.database.execute("insert into b values (1, 1)")
    orchestrated.sync()
    assert automated.is_requested()
    automated.materialize(MART)
    assert not automated.is_requested()
    click = location.repository.get_job(f"{NAME}_merge").execute_in_process(
        partition_key=orchestrated.windows()[-1], instance=orchestrated.instance
    )
    assert {e.asset_key for e in click.get_asset_materialization_events()} == {A, B}
    assert not automated.is_requested(), "all changes were merged before"
