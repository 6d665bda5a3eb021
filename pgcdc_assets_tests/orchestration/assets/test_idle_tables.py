"""Materialisations of a wide publication, of which few tables change."""

from __future__ import annotations

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import merge_tables
from pgcdc_assets.orchestration.assets import idle_tables
from pgcdc_assets.orchestration.data_versions import NO_CHANGE
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture
def wide(orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch) -> Orchestrated:
    """Return a publication whose two tables are more than the limit, merged once."""
    monkeypatch.setattr(idle_tables, "MOST_TABLES", 1)
    orchestrated.copy()
    orchestrated.land()
    assert materialized(merge(orchestrated)) == {"a", "b"}
    return orchestrated


def merge(wide: Orchestrated) -> dg.ExecuteInProcessResult:
    """Execute the request of the merge sensor."""
    (request,) = wide.tick("merges", one_shot=True).run_requests
    result = wide.execute(request, "merge")
    assert result.success
    return result


def materialized(result: dg.ExecuteInProcessResult) -> set[str]:
    """Return the names of the materialised tables."""
    return set(versions(result))


def versions(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """Return the data version of each materialised table."""
    return {
        event.asset_key.path[-1]: (event.materialization.tags or {})["dagster/data_version"]
        for event in result.get_asset_materialization_events()
        if event.asset_key is not None
    }


def change(wide: Orchestrated, statement: str) -> None:
    wide.commit(statement)
    wide.land()


@pytest.mark.sampled
def test_only_changed_tables_are_materialised(wide: Orchestrated, spark: SparkSession) -> None:
    change(wide, "insert into b values (1, 1)")
    assert materialized(merge(wide)) == {"b"}
    change(wide, "insert into a values (11, 'row')")
    assert materialized(merge(wide)) == {"a"}
    change(wide, "update b set n = 2")
    change(wide, "update a set v = 'all'")
    assert materialized(merge(wide)) == {"a", "b"}
    assert wide.equals_source("a") and wide.equals_source("b")


@pytest.mark.sampled
def test_a_merge_whose_run_was_killed_is_materialised_by_the_next_run(
    wide: Orchestrated, spark: SparkSession
) -> None:
    change(wide, "insert into a values (11, 'row')")
    # The commit of a run that was killed before its materialisation.
    through = LsnWindow.parse(wide.windows()[-1])
    assert len(list(merge_tables(spark, wide.zone, wide.capture.tables[:1], through))) == 1
    change(wide, "insert into b values (1, 1)")
    found = versions(merge(wide))
    assert set(found) == {"a", "b"}
    assert NO_CHANGE not in found.values()
    change(wide, "insert into b values (2, 1)")
    assert materialized(merge(wide)) == {"b"}


@pytest.mark.sampled
def test_a_recorded_watermark_is_shown_as_no_change(
    wide: Orchestrated, spark: SparkSession
) -> None:
    """Otherwise a later run would take the watermark for a change of a killed run."""
    windows = 12
    for number in range(windows):
        change(wide, f"insert into b values ({number}, 1)")
    found = versions(merge(wide))
    assert set(found) == {"a", "b"}
    assert found["a"] == NO_CHANGE
    change(wide, "insert into b values (100, 1)")
    assert materialized(merge(wide)) == {"b"}


@pytest.mark.sampled
def test_tables_that_a_person_selects_are_all_materialised(
    wide: Orchestrated, spark: SparkSession
) -> None:
    change(wide, "insert into b values (1, 1)")
    keys = [dg.AssetKey([NAME, "scd1", "public", name]) for name in ("a", "b")]
    job = wide.location.repository.get_implicit_job_def_for_assets(keys)
    assert job is not None
    result = job.execute_in_process(
        instance=wide.instance, partition_key=wide.windows()[-1], asset_selection=keys
    )
    assert materialized(result) == {"a", "b"}
