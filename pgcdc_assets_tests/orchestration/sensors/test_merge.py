"""The merge sensor: its requests, and the isolation of failing tables."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.cli import status
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.runs.long_runs import SECONDS_TAG
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw.relations.schema_events import CATALOG, SchemaChange, SchemaEvent
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = pytest.mark.postgres

RANGE = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
A = dg.AssetKey([NAME, "scd1", "public", "a"])
B = dg.AssetKey([NAME, "scd1", "public", "b"])


def failed_merge(orchestrated: Orchestrated, selection: list[dg.AssetKey], through: str) -> None:
    """Record a merge that failed just now."""
    job = orchestrated.location.repository.get_job(f"{NAME}_merge")
    run = orchestrated.instance.create_run_for_job(
        job,
        tags={"pgcdc/capture": NAME, "pgcdc/purpose": "merge", "pgcdc/through": through},
        asset_selection=frozenset(selection),
    )
    orchestrated.instance.report_run_failed(run)


def land_windows(orchestrated: Orchestrated, count: int) -> None:
    """Take snapshots of the tables, and land windows with one insert each."""
    orchestrated.copy()
    for number in range(count):
        orchestrated.database.execute(f"insert into b values ({number}, 1)")
        orchestrated.land()


def test_before_the_first_window_no_merge_is_requested(orchestrated: Orchestrated) -> None:
    assert orchestrated.tick("merges").skip_message == "nothing is captured yet"
    orchestrated.copy()
    assert orchestrated.tick("merges").skip_message == "no window is landed yet"


@pytest.mark.sampled
def test_one_run_merges_all_tables_from_the_oldest_through_the_newest_window(
    orchestrated: Orchestrated,
) -> None:
    land_windows(orchestrated, 3)
    (request,) = orchestrated.tick("merges").run_requests
    windows = orchestrated.windows()
    assert [request.tags[tag] for tag in RANGE] == [windows[0], windows[-1]]
    assert set(request.asset_selection or ()) == {A, B}
    assert request.asset_check_keys == [], "None would select all checks"


@pytest.mark.sampled
def test_of_very_many_windows_the_newest_are_shown_as_merged(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge folds the earlier windows too, and each Dagster event takes time."""
    monkeypatch.setattr("pgcdc_assets.orchestration.partitions.MAX_MATERIALIZATIONS", 5)
    land_windows(orchestrated, 4)
    (request,) = orchestrated.tick("merges").run_requests
    windows = orchestrated.windows()
    # Two tables have two windows each.
    assert [request.tags[tag] for tag in RANGE] == [windows[2], windows[3]]
    monkeypatch.setattr("pgcdc_assets.orchestration.partitions.MAX_MATERIALIZATIONS", 1)
    (request,) = orchestrated.tick("merges").run_requests
    assert [request.tags[tag] for tag in RANGE] == [windows[3], windows[3]]


@pytest.mark.sampled
def test_an_open_window_is_not_merged(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    orchestrated.land()
    landed = orchestrated.windows()
    orchestrated.commit("insert into b values (1, 1)")
    orchestrated.tick("lag")
    assert len(orchestrated.windows()) == 2
    (request,) = orchestrated.tick("merges").run_requests
    assert request.tags[RANGE[1]] == landed[-1]


@pytest.mark.sampled
def test_a_running_merge_blocks_the_next_merge_but_no_capture(
    orchestrated: Orchestrated,
) -> None:
    orchestrated.copy()
    orchestrated.land()
    (request,) = orchestrated.tick("merges").run_requests
    job = orchestrated.location.repository.get_job(f"{NAME}_merge")
    orchestrated.instance.create_run_for_job(job, tags=dict(request.tags))
    assert orchestrated.tick("merges").skip_message == "a merge is running"
    orchestrated.commit("insert into b values (1, 1)")
    assert orchestrated.tick("lag").run_requests != []


@pytest.mark.sampled
def test_a_table_whose_merge_failed_waits_and_the_others_continue(
    orchestrated: Orchestrated,
) -> None:
    """H8: at the sensor."""
    patient = Orchestrated(
        orchestrated.database,
        orchestrated.lake,
        orchestrated.instance,
        replace(orchestrated.capture, windows=WindowPolicy(max_age_seconds=0, retry_seconds=60)),
    )
    patient.copy()
    patient.land()
    (window,) = patient.windows()
    failed_merge(patient, [B], window)
    (request,) = patient.tick("merges").run_requests
    assert list(request.asset_selection or ()) == [A]
    assert 0 < float(request.tags[SECONDS_TAG]) <= 60, "the run ends when the table may be retried"
    failed_merge(patient, [A], window)
    assert "are retried later" in (patient.tick("merges").skip_message or "")
    (forced,) = patient.tick("merges", one_shot=True).run_requests
    assert set(forced.asset_selection or ()) == {A, B}


@pytest.mark.sampled
def test_each_attempt_has_its_own_run_key(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    orchestrated.land()
    (window,) = orchestrated.windows()
    (first,) = orchestrated.tick("merges").run_requests
    failed_merge(orchestrated, [A, B], window)
    (second,) = orchestrated.tick("merges").run_requests
    assert first.run_key != second.run_key


@pytest.mark.sampled
def test_a_table_is_not_merged_before_its_first_snapshot(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    orchestrated.land()
    orchestrated.database.execute("create table c (id int primary key)")
    orchestrated.database.execute("alter publication pub add table c")
    wider = Orchestrated(
        orchestrated.database,
        orchestrated.lake,
        orchestrated.instance,
        replace(
            orchestrated.capture, tables=(*orchestrated.capture.tables, CdcTable("public", "c"))
        ),
    )
    (request,) = wider.tick("merges").run_requests
    assert set(request.asset_selection or ()) == {A, B}
    copies = [r for r in wider.tick("lag").run_requests if r.job_name == f"{NAME}_snapshot"]
    assert [copies[0].tags[tag] for tag in RANGE] == ["public.c", "public.c"]


def _reason(failed: dg.ExecuteInProcessResult) -> str:
    """The sentence that a failed run shows."""
    (failure,) = failed.get_step_failure_events()
    data = failure.step_failure_data.user_failure_data
    return (data.description if data is not None else None) or ""


@pytest.mark.sampled
def test_a_damaged_table_affects_neither_sensors_nor_status_nor_other_tables(
    orchestrated: Orchestrated,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H8: its log cannot be read."""
    orchestrated.copy()
    orchestrated.land()
    (request,) = orchestrated.tick("merges").run_requests
    assert orchestrated.execute(request, "merge").success
    log = Path(orchestrated.lake.path(NAME, "scd1", "public", "a"), "_delta_log")
    newest = max(log.glob("*.json"))
    newest.write_text(newest.read_text()[:50])

    orchestrated.commit("insert into b values (7, 1)")
    assert orchestrated.tick("lag").run_requests, "captures continue"
    orchestrated.land()
    (request,) = orchestrated.tick("merges").run_requests
    failed = orchestrated.execute(request, "merge")
    assert not failed.success
    reason = _reason(failed)
    assert "public.a" in reason and "pgcdc rebuild t public.a" in reason
    assert orchestrated.equals_source("b")

    monkeypatch.setattr(status, "load_location", lambda module: orchestrated.location)
    monkeypatch.setattr(status, "open_instance", lambda: nullcontext(orchestrated.instance))
    assert status.run(argparse.Namespace(module=None, name=NAME, watch=None)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.lstrip().startswith("public.")] == [
        "STOPPED",
        "ok",
    ]
    assert any("STOPPED public.a" in line and "pgcdc rebuild t public.a" in line for line in lines)


@pytest.mark.soak
def test_a_renamed_table_keeps_its_declared_name_in_merges_and_snapshots(
    orchestrated: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """F8: changes under the new name are merged, and a re-snapshot reads the new name."""
    orchestrated.copy()
    orchestrated.land()
    (request,) = orchestrated.tick("merges").run_requests
    assert orchestrated.execute(request, "merge").success
    orchestrated.commit("alter table a rename to z")
    orchestrated.commit("insert into z values (11, 'new')")
    orchestrated.land()
    state = read_state(orchestrated.zone, orchestrated.capture)
    assert {s.table.table: s.waiting_changes for s in state.tables} == {"a": 1, "b": 0}
    (request,) = orchestrated.tick("merges").run_requests
    merged = orchestrated.execute(request, "merge")
    assert merged.success
    events = merged.get_asset_materialization_events()
    layer = dg.AssetKey([NAME, "scd1", "public", "a"])
    (metadata,) = [e.materialization.metadata for e in events if e.asset_key == layer]
    assert metadata["source_name"].value == "public.z"
    assert metadata["window_changes"].value == 1
    assert orchestrated.equals_source("a")
    monkeypatch.setattr(status, "load_location", lambda module: orchestrated.location)
    monkeypatch.setattr(status, "open_instance", lambda: nullcontext(orchestrated.instance))
    assert status.run(argparse.Namespace(module=None, name=NAME, watch=None)) == 0
    assert "RENAMED public.a is named public.z at the source" in capsys.readouterr().out

    orchestrated.commit("insert into z values (12, 'newer')")
    settings, zone = orchestrated.database.settings(), orchestrated.zone
    (report,) = snapshot_tables(
        settings, zone, orchestrated.capture.slot, "pub", [TableName("public", "a")]
    )
    assert (str(report.name), report.row_count) == ("public.a", 12)
    orchestrated.commit("update z set v = 'later' where id = 12")
    orchestrated.land()
    (request,) = orchestrated.tick("merges").run_requests
    assert orchestrated.execute(request, "merge").success
    assert orchestrated.equals_source("a")
    assert orchestrated.tick("merges").skip_message == (
        "every table is merged through the newest window"
    )


@pytest.mark.spark
@pytest.mark.slow
def test_a_snapshot_before_a_later_schema_event_is_merged_without_changes(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """A sync whose barrier is the snapshot would not end while the table waits for a later one."""
    tables = (CdcTable("public", "a", (1, 2)), orchestrated.capture.tables[1])
    orchestrated = replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))
    orchestrated.sync()
    database, zone, a = orchestrated.database, orchestrated.zone, TableName("public", "a")
    snapshot_tables(database.settings(), zone, orchestrated.capture.slot, "pub", [a])
    orchestrated.commit("insert into b values (1, 1)")
    ((lsn, oid),) = database.query("select pg_current_wal_lsn()::text, 'a'::regclass::oid::int")
    event = SchemaEvent(
        *(1, Lsn.parse(lsn), a, oid, SchemaChange.TABLE_RECREATED, (), "Another table.", True),
        CATALOG,
    )
    zone.schema_events.record([event])
    orchestrated.commit("insert into b values (2, 1)")
    requests = orchestrated.tick("lag", one_shot=True).run_requests
    (request,) = [each for each in requests if each.job_name == f"{NAME}_capture"]
    assert orchestrated.execute(request, "capture").success

    (request,) = orchestrated.tick("merges").run_requests
    assert {key.path[-1] for key in request.asset_selection} == {"a", "b"}
    assert orchestrated.execute(request, "merge").success
    found = read_state(zone, orchestrated.capture).tables
    states = [each for each in found if each.table.name == a]
    assert [state.is_held for state in states] == [True, True]
    for state in states:
        assert state.watermark is not None and state.snapshot_at is not None
        assert state.snapshot_at <= state.watermark < event.position
    assert orchestrated.tick("merges").skip_message == "waiting for a re-snapshot: public.a"
