"""A re-snapshot of a table during changes is applied, and other tables continue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure
from pgcdc_assets.capture.snapshots.run import snapshot_each_table
from pgcdc_assets.errors import TransientError
from pgcdc_assets.orchestration.assets.snapshot import build_snapshot_asset
from pgcdc_assets.raw.snapshots import SnapshotStore
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

A = dg.AssetKey([NAME, "scd1", "public", "a"])
B = dg.AssetKey([NAME, "scd1", "public", "b"])


def merge_both(orchestrated: Orchestrated) -> dg.ExecuteInProcessResult:
    """Land changes of both tables, and execute the merge sensor's request."""
    orchestrated.database.execute("insert into a select max(id) + 1, 'new' from a")
    orchestrated.database.execute("insert into b select coalesce(max(id), 0) + 1, 1 from b")
    orchestrated.land()
    (request,) = orchestrated.tick("merges").run_requests
    return orchestrated.execute(request, "merge")


def merged(result: dg.ExecuteInProcessResult) -> set[dg.AssetKey]:
    events = result.get_asset_materialization_events()
    return {event.asset_key for event in events if event.asset_key is not None}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "tags",
    [
        pytest.param({"dagster/partition": "public.a"}, id="one"),
        pytest.param(
            {
                "dagster/asset_partition_range_start": "public.a",
                "dagster/asset_partition_range_end": "public.a",
            },
            id="range",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_table_is_not_merged_until_its_snapshot_has_ended(
    orchestrated: Orchestrated, spark: SparkSession, tags: dict[str, str]
) -> None:
    """C12: a merge beyond the snapshot's LSN would make the snapshot useless."""
    orchestrated.copy()
    assert merged(merge_both(orchestrated)) == {A, B}
    run = orchestrated.start_run("snapshot", tags)
    assert merged(merge_both(orchestrated)) == {B}
    waiting = orchestrated.tick("merges").skip_message
    assert waiting == "re-snapshot running: public.a"
    orchestrated.instance.report_run_canceled(run)
    (request,) = orchestrated.tick("merges").run_requests
    assert A in merged(orchestrated.execute(request, "merge"))


@pytest.mark.soak
def test_a_run_requested_before_the_snapshot_skips_the_table_with_a_reason(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    orchestrated.copy()
    merge_both(orchestrated)
    orchestrated.database.execute("insert into a values (50, 'x')")
    orchestrated.database.execute("insert into b values (50, 1)")
    orchestrated.land()
    (request,) = orchestrated.tick("merges").run_requests
    orchestrated.start_run("snapshot", {})
    result = orchestrated.execute(request, "merge")
    assert not result.success
    assert merged(result) == set()
    (failure,) = result.get_step_failure_events()
    assert "public.a is merged after its running re-snapshot" in str(failure.event_specific_data)


@pytest.mark.sampled
def test_a_resnapshot_of_an_unreadable_table_succeeds_and_stops_no_sensor(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """H8: a re-snapshot is the remedy for the table's error."""
    orchestrated.copy()
    merge_both(orchestrated)
    log = Path(orchestrated.lake.path(NAME, "scd1", "public", "a", "_delta_log"))
    min(log.glob("*.json")).write_bytes(b"not a commit")
    orchestrated.start_run("snapshot", {"dagster/partition": "public.a"})
    assert merged(merge_both(orchestrated)) == {B}
    job = orchestrated.location.repository.get_job(f"{NAME}_snapshot")
    assert job.execute_in_process(
        instance=orchestrated.instance, partition_key="public.a", raise_on_error=False
    ).success


@pytest.mark.sampled
def test_a_retried_snapshot_run_reads_only_failed_tables(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4, C5."""
    orchestrated.copy()
    asked: list[list[tuple[str, str]]] = []

    def flaky(*args: Any, **options: Any) -> Iterator[object]:
        asked.append(args[-1])
        for outcome in snapshot_each_table(*args, **options):
            if outcome.table == "b" and len(asked) == 1:
                error = TransientError(reason="The connection was lost.")
                yield SnapshotFailure(outcome.schema, outcome.table, error)
            else:
                yield outcome

    monkeypatch.setattr(f"{build_snapshot_asset.__module__}.snapshot_each_table", flaky)
    job = orchestrated.location.repository.get_job(f"{NAME}_snapshot")
    both = {
        "dagster/asset_partition_range_start": "public.a",
        "dagster/asset_partition_range_end": "public.b",
    }
    assert job.execute_in_process(instance=orchestrated.instance, tags=both).success
    assert asked == [[("public", "a"), ("public", "b")], [("public", "b")]]
    materialized = orchestrated.instance.get_materialized_partitions(
        dg.AssetKey([NAME, "snapshot"])
    )
    assert materialized == {"public.a", "public.b"}


@pytest.mark.sampled
@pytest.mark.parametrize("sees_it", [True, False])
def test_a_snapshot_that_another_process_merged_past_is_reported_if_it_is_not_applied(
    orchestrated: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    sees_it: bool,
) -> None:
    """Another Dagster instance does not know the runs of this instance."""
    orchestrated.copy()
    merge_both(orchestrated)
    request = orchestrated.tick("merges", one_shot=True)
    assert request.skip_message
    real = SnapshotStore.complete_snapshots

    def without_newest(store: SnapshotStore, epoch: int | None = None) -> Any:
        return real(store, epoch)[:2]

    def slow(*args: Any, **options: Any) -> object:
        outcomes = list(snapshot_each_table(*args, **options))
        with monkeypatch.context() as patched:
            if not sees_it:
                patched.setattr(SnapshotStore, "complete_snapshots", without_newest)
            assert merged(merge_both(orchestrated)) == {A, B}
        return outcomes

    monkeypatch.setattr(f"{build_snapshot_asset.__module__}.snapshot_each_table", slow)
    monkeypatch.setattr(
        "pgcdc_assets.orchestration.runs.snapshot_runs.RunningSnapshots.find",
        lambda *args: frozenset(),
    )
    job = orchestrated.location.repository.get_job(f"{NAME}_snapshot")
    result = job.execute_in_process(
        instance=orchestrated.instance, partition_key="public.a", raise_on_error=False
    )
    assert result.success is sees_it
    for failure in result.get_step_failure_events():
        assert "merged past the LSN of the snapshot" in str(failure.event_specific_data)
    assert orchestrated.equals_source("a")
