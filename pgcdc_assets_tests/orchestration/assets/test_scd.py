"""The metadata of a merge in Dagster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.orchestration.assets import merge_rounds
from pgcdc_assets.orchestration.data_versions import NO_CHANGE
from pgcdc_assets.settings.policies import RetentionPolicy
from pgcdc_assets.tables import vacuum
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark, merge_together

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

B = dg.AssetKey([NAME, "scd1", "public", "b"])


def shown(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    """Return one metadata value of table b, per window that has the value."""
    return {
        str(event.partition): event.materialization.metadata[name].value
        for event in result.get_asset_materialization_events()
        if event.asset_key == B and name in event.materialization.metadata
    }


@pytest.mark.sampled
def test_the_figures_of_a_merge_of_several_windows_are_shown_once(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    orchestrated.copy()
    for statement in (
        "insert into b select n, 1 from generate_series(1, 5) n",
        "insert into a values (100, 'another table')",
        "update b set n = 2 where id <= 3",
    ):
        orchestrated.commit(statement)
        orchestrated.land()
    windows = orchestrated.windows()
    (request,) = orchestrated.tick("merges", one_shot=True).run_requests
    result = orchestrated.execute(request, "merge")
    assert result.success

    newest = windows[-1]
    assert shown(result, "changes_read") == {newest: 8}
    assert shown(result, "rows_inserted") == {newest: 5}
    assert shown(result, "windows_folded") == {newest: 3}
    assert shown(result, "window_changes") == dict(zip(windows, [5, 0, 3], strict=True))
    assert shown(result, "inserts") == dict(zip(windows, [5, 0, 0], strict=True))
    assert shown(result, "updates") == dict(zip(windows, [0, 0, 3], strict=True))
    assert shown(result, "dagster/row_count") == dict.fromkeys(windows, 5)
    assert shown(result, "through_window") == dict.fromkeys(windows, newest)


def merge_some(
    orchestrated: Orchestrated, merges: int, first: int = 0
) -> list[dg.ExecuteInProcessResult]:
    """Change and merge table b as often as `merges` says; the rows are numbered from `first`."""
    results = []
    for number in range(first, first + merges):
        orchestrated.commit(f"insert into b values ({number}, 1)")
        orchestrated.land()
        (request,) = orchestrated.tick("merges", one_shot=True).run_requests
        results.append(orchestrated.execute(request, "merge"))
    return results


@pytest.mark.sampled
def test_the_run_tells_why_spark_merged_a_table(
    orchestrated: Orchestrated, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestrated.copy()
    merge_together(monkeypatch)
    [together] = merge_some(orchestrated, 1)
    merge_by_spark(monkeypatch)
    [apart] = merge_some(orchestrated, 1, first=1)
    reason = "PGCDC_MERGE_SMALL_TABLES is apart"
    newest = orchestrated.windows()[-1]
    assert shown(together, "merged_by_spark") == {}
    assert shown(apart, "merged_by_spark") == {newest: reason}
    for result, expected in [
        (together, []),
        (apart, [f"public.b (scd1) was merged by Spark: {reason}"]),
    ]:
        logged = [each.user_message for each in orchestrated.instance.all_logs(result.run_id)]
        assert [
            line for line in logged if line.startswith("public.b") and "Spark" in line
        ] == expected


def files_of_b(orchestrated: Orchestrated) -> int:
    path = Path(table_path(orchestrated.lake, NAME, "public", "b", 1))
    return len(list(path.rglob("part-*.parquet")))


@pytest.mark.sampled
def test_merges_delete_files_that_they_replaced(
    orchestrated: Orchestrated, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The used disk space has a bound that does not depend on the number of merges."""
    monkeypatch.setattr(vacuum, "MINIMUM_BYTES", 0)
    monkeypatch.setattr(RetentionPolicy, "keep_hours", property(lambda _: 0.0))
    orchestrated.copy()
    assert all(result.success for result in merge_some(orchestrated, 11))
    # Each merge rewrites one file, and two of ten versions delete. Without it eleven files remain.
    assert files_of_b(orchestrated) < 11
    assert orchestrated.equals_source("b")


@pytest.mark.sampled
def test_a_merge_succeeds_if_replaced_files_cannot_be_deleted(
    orchestrated: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise TransientError(reason="Replaced files of the Delta table cannot be deleted")

    monkeypatch.setattr(merge_rounds, "is_check_due", lambda path, version: True)
    monkeypatch.setattr(merge_rounds, "vacuum_after_merge", fail)
    orchestrated.copy()
    [result] = merge_some(orchestrated, 1)
    assert result.success
    # Each log handler prints a line, and other tests of this process may have added handlers.
    lines = [x for x in capfd.readouterr().err.splitlines() if "cannot be deleted" in x]
    assert lines and all("WARNING" in line for line in lines)
    assert orchestrated.equals_source("b")


@pytest.mark.sampled
@pytest.mark.parametrize("is_repeated", [False, True], ids=["selected", "executed again"])
def test_a_window_of_the_past_that_a_person_merges_again_hides_no_later_merge(
    orchestrated: Orchestrated, spark: SparkSession, is_repeated: bool
) -> None:
    """Otherwise the next merge reports all windows since then, and the tables as changed."""
    orchestrated.copy()
    first, second = merge_some(orchestrated, 2)
    assert first.success and second.success
    past, newest = orchestrated.windows()
    orchestrated.commit("insert into a values (100, 'another table')")
    orchestrated.land()
    job = orchestrated.location.repository.get_job(f"{NAME}_merge")
    if is_repeated:
        # Dagster copies the tags of the sensor.
        run = orchestrated.create_run("merge", first.dagster_run.tags, repeats=first.run_id)
        assert execute_run(InMemoryJob(job), run, orchestrated.instance).success
    else:
        again = job.execute_in_process(instance=orchestrated.instance, partition_key=past)
        assert again.success
        assert shown(again, "through_window") == {past: newest}
    (request,) = orchestrated.tick("merges", one_shot=True).run_requests
    assert orchestrated.windows()[:2] == [past, newest]
    assert request.tags["dagster/asset_partition_range_start"] == orchestrated.windows()[2]
    result = orchestrated.execute(request, "merge")
    versions = [
        (event.materialization.tags or {})["dagster/data_version"]
        for event in result.get_asset_materialization_events()
        if event.asset_key == B
    ]
    assert versions == [NO_CHANGE]
