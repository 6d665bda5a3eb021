"""Checks, rebuilds and maintenance of tables, executed by Dagster."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS, INVARIANTS_IN_FULL
from pgcdc_assets.orchestration.checks.raw import SOURCE_TABLE
from pgcdc_assets.orchestration.checks.scd import EQUALS_SOURCE
from pgcdc_assets.orchestration.checks.schema_changes import SCHEMA_CHANGES
from pgcdc_assets.settings.policies import MessagePolicy, RetentionPolicy
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.messages import MessageTable
from pgcdc_assets.tables.properties import LOG_RETENTION
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


def run(orchestrated: Orchestrated, job: str, **config: Any) -> dg.ExecuteInProcessResult:
    return orchestrated.location.repository.get_job(f"{NAME}_{job}").execute_in_process(
        instance=orchestrated.instance, raise_on_error=False, **config
    )


def equals_source(orchestrated: Orchestrated, table: str) -> dg.ExecuteInProcessResult:
    key = dg.AssetKey([NAME, "scd1", "public", table])
    selection = dg.AssetSelection.checks(dg.AssetCheckKey(key, EQUALS_SOURCE))
    job = dg.define_asset_job("one_check", selection=selection)
    definitions = dg.Definitions.merge(
        orchestrated.location.definitions, dg.Definitions(jobs=[job])
    )
    return definitions.resolve_job_def("one_check").execute_in_process(
        instance=orchestrated.instance, raise_on_error=False
    )


def live(orchestrated: Orchestrated, table: str) -> str:
    zone = orchestrated.zone
    return delta_table(table_path(zone.lake, zone.name, "public", table, 1))


def copies(orchestrated: Orchestrated, table: str) -> list[int]:
    found = orchestrated.zone.snapshots.complete_snapshots()
    return [int(copy.snapshot_lsn) for copy in found if copy.table == table]


@pytest.mark.sampled
def test_the_check_waits_for_the_capture_and_reports_counts_and_columns(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    orchestrated.sync()
    spark.sql(f"UPDATE {live(orchestrated, 'a')} SET v = 'secret' WHERE id = 3")
    capture = replace(orchestrated.capture, verify_wait_seconds=0.5)
    impatient = replace(orchestrated, capture=capture)
    alone = equals_source(impatient, "a")
    assert alone.success
    (evaluation,) = alone.get_asset_check_evaluations()
    assert not evaluation.passed
    assert evaluation.severity == dg.AssetCheckSeverity.WARN
    assert evaluation.metadata["is_judged"].value is False
    assert (evaluation.description or "").startswith("Not judged yet. The source was read at")

    daemon = threading.Timer(2.0, lambda: orchestrated.land())
    daemon.start()
    result = equals_source(orchestrated, "a")
    daemon.join()
    assert result.success
    (evaluation,) = result.get_asset_check_evaluations()
    assert not evaluation.passed
    assert evaluation.metadata["differing_row_count"].value == 1.0
    assert evaluation.metadata["differing_columns"].value == "v"
    assert "secret" not in str(evaluation.metadata)


@pytest.mark.sampled
def test_a_run_that_materialises_does_not_compare_with_the_source(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """A run of raw, a table and the check: the check would wait for a capture that cannot run."""
    orchestrated.copy()
    (request,) = orchestrated.tick("lag", one_shot=True).run_requests
    orchestrated.database.execute("insert into a values (77, 'after the window')")
    table = dg.AssetKey([NAME, "scd1", "public", "a"])
    click = orchestrated.location.definitions.resolve_implicit_global_asset_job_def().get_subset(
        asset_selection=frozenset({orchestrated.raw, table})
    )
    result = click.execute_in_process(
        instance=orchestrated.instance, partition_key=request.partition_key, raise_on_error=False
    )
    assert result.success
    evaluated = {
        evaluation.check_name: evaluation.passed
        for evaluation in result.get_asset_check_evaluations()
        if evaluation.asset_key == table
    }
    expected = (INVARIANTS, INVARIANTS_IN_FULL, SOURCE_TABLE, SCHEMA_CHANGES)
    assert evaluated == dict.fromkeys(expected, True)


@pytest.mark.sampled
def test_the_rebuild_job_corrects_tables_and_the_sensor_merges_later_windows(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    orchestrated.sync()
    first = orchestrated.zone.changes.captured_through(1)
    orchestrated.database.execute("update a set v = 'later' where id > 5")
    orchestrated.sync()
    spark.sql(f"DELETE FROM {live(orchestrated, 'a')} WHERE id > 2")
    config: dict[str, Any] = {
        "ops": {f"{NAME}_rebuild_tables": {"config": {"tables": ["public.a"]}}}
    }
    result = run(orchestrated, "rebuild", run_config=config)
    assert result.success
    (event,) = result.get_asset_observation_events()
    observed = event.asset_observation_data.asset_observation
    assert observed.metadata["dagster/row_count"].value == 10
    assert spark.sql(f"SELECT * FROM {live(orchestrated, 'a')} WHERE v = 'later'").count() == 5

    config["ops"][f"{NAME}_rebuild_tables"]["config"] = {"through": str(first)}
    assert run(orchestrated, "rebuild", run_config=config).success
    assert spark.sql(f"SELECT * FROM {live(orchestrated, 'a')} WHERE v = 'later'").count() == 0
    orchestrated.sync()
    assert spark.sql(f"SELECT * FROM {live(orchestrated, 'a')} WHERE v = 'later'").count() == 5


@pytest.mark.sampled
def test_a_rebuild_of_a_missing_table_is_an_error(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    orchestrated.sync()
    for config, sentence in (
        ({"tables": ["public.nope"]}, "has no table public.nope"),
        ({"through": "nonsense"}, "nonsense"),
        ({"through": "FFFF/0"}, "captured through"),
    ):
        ops = {"ops": {f"{NAME}_rebuild_tables": {"config": config}}}
        result = run(orchestrated, "rebuild", run_config=ops)
        assert not result.success
        (failure,) = result.filter_events(lambda event: event.is_step_failure)
        data = failure.step_failure_data.user_failure_data
        assert data is not None
        assert sentence in (data.description or "")


@pytest.mark.soak
def test_maintenance_deletes_old_windows_and_their_keys(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    kept_all = orchestrated
    kept_all.sync()
    for turn in range(2):
        kept_all.database.execute("update a set v = %s where id = 1", (str(turn),))
        kept_all.database.execute("insert into b values (%s, 1)", (turn,))
        kept_all.sync()
    before = kept_all.windows()
    assert run(kept_all, "upkeep").success
    assert kept_all.windows() == before

    retention = RetentionPolicy(raw_days=0)
    capture = replace(kept_all.capture, retention=retention, messages=MessagePolicy())
    strict = replace(kept_all, capture=capture)
    result = run(strict, "upkeep")
    assert result.success
    floor = strict.zone.changes.kept_from(1)
    assert floor is not None
    # The table of logical messages is a reader of the windows, also without a message.
    mark = MessageTable(strict.zone).watermark()
    assert mark is not None and mark.lsn >= floor
    assert strict.windows() == [key for key in before if int(key[-16:], 16) > floor]
    assert len(strict.windows()) < len(before)
    assert strict.zone.changes.windows(1) == []
    (event,) = result.get_asset_observation_events()
    observed = event.asset_observation_data.asset_observation
    assert observed.metadata["kept_from"].value == str(floor)

    strict.database.execute("delete from a where id = 2")
    strict.database.execute("select pg_logical_emit_message(true, 'audit', 'deleted')")
    snapshot_tables(
        strict.database.settings(),
        strict.zone,
        strict.capture.slot,
        "pub",
        [TableName("public", "a")],
    )
    strict.sync()
    assert spark.sql(f"SELECT * FROM {live(strict, 'a')}").count() == 9
    messages = DeltaTable(strict.lake.path(NAME, "messages")).to_pyarrow_table()
    assert messages.column("text").to_pylist() == ["deleted"]
    assert len(copies(strict, "a")) == 2
    newest = copies(strict, "a")[-1:]
    assert run(strict, "upkeep").success
    assert copies(strict, "a") == newest
    assert len(copies(strict, "b")) == 1


@pytest.mark.sampled
def test_a_damaged_table_of_messages_does_not_stop_the_maintenance_of_the_others(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    capture = replace(orchestrated.capture, messages=MessagePolicy())
    made = replace(orchestrated, capture=capture)
    made.sync()
    made.database.execute("select pg_logical_emit_message(true, 'audit', 'one')")
    made.sync()
    for entry in Path(made.lake.path(NAME, "messages"), "_delta_log").glob("*.json"):
        entry.write_text("{")
    result = run(made, "upkeep")
    assert not result.success
    (failure,) = result.filter_events(lambda event: event.is_step_failure)
    data = failure.step_failure_data.user_failure_data
    assert data is not None
    assert (data.description or "").startswith("Not maintained: logical messages. ")
    for table in ("a", "b"):
        path = table_path(made.lake, NAME, "public", table, 1)
        assert LOG_RETENTION in DeltaTable(path).metadata().configuration


@pytest.mark.sampled
def test_maintenance_keeps_all_windows_while_a_table_was_never_merged(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    retention = RetentionPolicy(raw_days=0)
    strict = replace(orchestrated, capture=replace(orchestrated.capture, retention=retention))
    strict.copy()
    strict.land()
    assert run(strict, "upkeep").success
    assert strict.zone.changes.kept_from(1) is None


@pytest.mark.sampled
def test_maintenance_maintains_the_tables_if_old_windows_cannot_be_removed(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    retention = RetentionPolicy(raw_days=0)
    capture = replace(orchestrated.capture, messages=MessagePolicy(), retention=retention)
    damaged = replace(orchestrated, capture=capture)
    damaged.sync()
    log = Path(damaged.lake.path(NAME, "messages", "_delta_log"))
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("no commit")
    result = run(damaged, "upkeep")
    failed = {e.step_key: e.step_failure_data for e in result.all_events if e.is_step_failure}
    assert failed.keys() == {f"{NAME}_remove_old_windows", f"{NAME}_tidy_up"}
    data = failed[f"{NAME}_tidy_up"].user_failure_data
    assert data is not None
    description = data.description or ""
    assert description.startswith("Not maintained: logical messages.")
    lines = [entry.user_message for entry in damaged.instance.all_logs(result.run_id)]
    assert any("public.a (scd1): " in line and " files became " in line for line in lines), lines
