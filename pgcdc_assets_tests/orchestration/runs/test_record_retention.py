"""Retention of Dagster's records: runs, results of checks, and events of sensors."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    SqlEventLogStorageTable,
)
from sqlalchemy import Column, func, select, text

from pgcdc_assets import failpoints
from pgcdc_assets.orchestration.checks.raw import SLOT_HEALTH, WINDOW_CHECKS
from pgcdc_assets.orchestration.jobs import maintenance
from pgcdc_assets.orchestration.runs import record_retention
from pgcdc_assets.orchestration.runs.record_retention import RecordReport, delete_old_records
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG
from pgcdc_assets.settings.policies import MessagePolicy
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = pytest.mark.postgres

LATER = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)


@pytest.fixture
def landed(orchestrated: Orchestrated) -> Orchestrated:
    """Land three windows, each by a run of its own."""
    orchestrated.copy()
    for number in range(3):
        orchestrated.database.execute("insert into b values (%s, 1)", (number,))
        orchestrated.land()
    return orchestrated


def delete(orchestrated: Orchestrated, older_than: dt.datetime = LATER) -> RecordReport:
    instance, capture = orchestrated.instance, orchestrated.capture
    return delete_old_records(instance, capture, orchestrated.raw, [], older_than)


def forget_keys(orchestrated: Orchestrated, count: int) -> list[str]:
    """Delete the oldest partition keys, and return their windows' runs, oldest first."""
    name, runs = orchestrated.capture.windows_name, []
    for key in orchestrated.windows()[:count]:
        filters = dg.RunsFilter(tags={"dagster/partition": key})
        runs += [run.run_id for run in orchestrated.instance.get_runs(filters)]
        orchestrated.instance.delete_dynamic_partition(name, key)
    return runs


def run_ids(instance: dg.DagsterInstance) -> set[str]:
    return {run.run_id for run in instance.get_runs()}


def rows_of(instance: dg.DagsterInstance, column: Column[str], run_id: str) -> int:
    """Count the rows of a run in a table of the index."""
    storage = instance.event_log_storage
    assert isinstance(storage, SqliteEventLogStorage)
    with storage.index_connection() as conn:
        return int(conn.execute(select(func.count()).where(column == run_id)).scalar_one())


def files_of(instance: dg.DagsterInstance, run_id: str) -> list[Path]:
    return [path for path in Path(instance.root_directory).rglob("*") if run_id in path.name]


@pytest.mark.sampled
def test_runs_of_windows_without_a_key_are_deleted_with_their_records(
    landed: Orchestrated,
) -> None:
    instance = landed.instance
    every = run_ids(instance)
    gone = forget_keys(landed, 2)
    assert len(gone) == 2
    assert all(files_of(instance, run_id) for run_id in gone)
    deleted = delete(landed)
    assert (deleted.runs, deleted.check_results) == (2, 2 * len(WINDOW_CHECKS))
    assert run_ids(instance) == every - set(gone)
    for run_id in gone:
        assert files_of(instance, run_id) == []
        assert rows_of(instance, SqlEventLogStorageTable.c.run_id, run_id) == 0
        assert rows_of(instance, AssetCheckExecutionsTable.c.run_id, run_id) == 0
    assert delete(landed) == RecordReport()
    landed.database.execute("delete from b")
    landed.land()


@pytest.mark.sampled
def test_the_records_of_runs_are_read_in_pages(
    landed: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, pages = landed.instance, list[int]()
    read = instance.get_run_records

    def count(*arguments: Any, **options: Any) -> Sequence[dg.RunRecord]:
        records = read(*arguments, **options)
        pages.append(len(records))
        return records

    gone = forget_keys(landed, 2)
    monkeypatch.setattr(record_retention, "RECORDS_AT_ONCE", 2, raising=False)
    monkeypatch.setattr(instance, "get_run_records", count)
    assert delete(landed).runs == 2
    assert max(pages) == 2
    assert not run_ids(instance).intersection(gone)


@pytest.mark.sampled
def test_the_partitions_of_all_keys_stay_materialised(landed: Orchestrated) -> None:
    """No key is deleted, so the UI shows all windows, also the oldest one."""
    every = run_ids(landed.instance)
    assert delete(landed).runs == 0
    assert run_ids(landed.instance) == every
    shown = landed.instance.get_materialized_partitions(landed.raw)
    assert shown == set(landed.windows())


@pytest.mark.sampled
def test_young_runs_are_kept(landed: Orchestrated) -> None:
    forget_keys(landed, 2)
    young = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)
    assert delete(landed, older_than=young) == RecordReport()


@pytest.mark.sampled
def test_the_newest_materialisation_and_the_newest_results_of_checks_are_kept(
    landed: Orchestrated,
) -> None:
    """Without a key nothing is shown but the asset itself, and the snapshots of its tables."""
    *old, newest = forget_keys(landed, 3)
    snapshots = run_ids(landed.instance) - {*old, newest}
    assert delete(landed).runs == 2
    assert run_ids(landed.instance) == {newest, *snapshots}
    newest_event = landed.instance.get_latest_materialization_event(landed.raw)
    assert newest_event is not None and newest_event.run_id == newest
    checks = [dg.AssetCheckKey(landed.raw, name) for name in WINDOW_CHECKS]
    found = landed.instance.event_log_storage.get_latest_asset_check_execution_by_key(checks)
    assert set(found) == set(checks)


@pytest.mark.sampled
def test_the_newest_materialisation_of_the_messages_is_kept(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maintenance job knows the asset of the messages."""
    policy = replace(orchestrated.capture.retention, record_days=1)
    capture = replace(orchestrated.capture, messages=MessagePolicy(), retention=policy)
    made = replace(orchestrated, capture=capture)
    made.copy()
    runs = []
    for number in range(2):
        made.commit(f"select pg_logical_emit_message(true, 'audit', '{number}')")
        made.land()
        (request,) = made.tick("messages").run_requests
        runs.append(made.execute(request, "messages").run_id)
    forget_keys(made, 2)
    # The job keeps the records of at least a day.
    monkeypatch.setattr(
        maintenance,
        "delete_old_records",
        lambda instance, capture, raw, others, older_than: delete_old_records(
            instance, capture, raw, others, LATER
        ),
    )
    job = made.location.repository.get_job(f"{NAME}_upkeep")
    selection = [f"{NAME}_delete_old_records"]
    subset = job.get_subset(op_selection=selection)
    assert subset.execute_in_process(instance=made.instance).success
    assert run_ids(made.instance).intersection(runs) == {runs[1]}


@pytest.mark.sampled
@pytest.mark.parametrize("tags", [{}, {CAPTURE_TAG: "other"}])
def test_runs_of_others_are_kept(landed: Orchestrated, tags: dict[str, str]) -> None:
    @dg.job(tags=tags)
    def another() -> None:
        pass

    run_id = another.execute_in_process(instance=landed.instance).run_id
    forget_keys(landed, 3)
    delete(landed)
    assert run_id in run_ids(landed.instance)


@pytest.mark.sampled
def test_an_unfinished_run_is_kept(landed: Orchestrated) -> None:
    run = landed.start_run("upkeep", {})
    forget_keys(landed, 3)
    delete(landed)
    assert run.run_id in run_ids(landed.instance)


@pytest.mark.sampled
def test_an_interrupted_deletion_is_repeated(
    landed: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H7: a run whose events are gone is still listed, so the next call deletes it."""

    def stop(name: str) -> None:
        raise KeyboardInterrupt

    gone = forget_keys(landed, 1)
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "reach", stop)
        with pytest.raises(KeyboardInterrupt):
            delete(landed)
    assert set(gone) < run_ids(landed.instance)
    assert delete(landed).runs == 1
    assert files_of(landed.instance, gone[0]) == []


@pytest.mark.sampled
def test_old_events_of_the_lag_sensor_are_deleted(
    landed: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc_assets.orchestration.sensors.lag_observation.EVERY_SECONDS", 0.0)
    landed.tick("lag")
    before = rows_of(landed.instance, SqlEventLogStorageTable.c.run_id, "")
    forget_keys(landed, 3)
    slot = dg.AssetCheckKey(landed.raw, SLOT_HEALTH)
    # An observation and a result of the slot's check by each evaluation.
    deleted = delete(landed).sensor_events
    assert deleted >= 4
    left = rows_of(landed.instance, SqlEventLogStorageTable.c.run_id, "")
    # The sensor records a result about a source table once.
    assert left == before - deleted == len(landed.capture.tables)
    assert landed.instance.fetch_observations(landed.raw, limit=10).records == []
    storage = landed.instance.event_log_storage
    assert set(storage.get_latest_asset_check_execution_by_key([slot])) == {slot}


def test_records_of_another_release_of_dagster_fail_the_step_with_a_sentence(
    orchestrated: Orchestrated,
) -> None:
    """The text of the database has its statement with all parameters."""
    storage = orchestrated.instance.event_log_storage
    assert isinstance(storage, SqliteEventLogStorage)
    with storage.index_connection() as conn:
        conn.execute(text("alter table asset_check_executions rename to of_another_release"))
    job = orchestrated.location.repository.get_job(f"{NAME}_upkeep")
    subset = job.get_subset(op_selection=[f"{NAME}_delete_old_records"])
    result = subset.execute_in_process(instance=orchestrated.instance, raise_on_error=False)
    (failure,) = result.filter_events(lambda event: event.is_step_failure)
    data = failure.step_failure_data.user_failure_data
    assert data is not None
    assert "`dagster instance migrate`" in (data.description or "")
