"""The materialisations of the snapshot asset after failed and killed runs."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.orchestration.sensors import unrecorded_snapshots
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = pytest.mark.postgres

SNAPSHOT = dg.AssetKey([NAME, "snapshot"])


@pytest.mark.sampled
def test_a_failed_run_reports_the_tables_that_it_has_copied(orchestrated: Orchestrated) -> None:
    """`pgcdc sync` names the tables that are missing from this report."""
    orchestrated.database.execute("create table c (id int primary key)")
    tables = (*orchestrated.capture.tables, CdcTable("public", "c"))
    wider = replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))
    (request,) = wider.tick("lag").run_requests
    result = wider.execute(request, "snapshot")
    assert not result.success
    copied = {event.partition for event in result.get_asset_materialization_events()}
    assert copied == {"public.a", "public.b"}
    assert wider.instance.get_materialized_partitions(SNAPSHOT) == copied


@pytest.mark.sampled
def test_a_table_whose_run_was_killed_after_its_copy_gets_its_record(
    orchestrated: Orchestrated,
) -> None:
    """The next run copies the other tables only."""
    (request,) = orchestrated.tick("lag").run_requests
    run = orchestrated.start_run("snapshot", request.tags)
    # A process that is killed here has recorded nothing.
    capture, zone = orchestrated.capture, orchestrated.zone
    settings, source = orchestrated.database.settings(), (capture.slot, capture.publication)
    snapshot_tables(settings, zone, *source, [capture.tables[0].name])
    orchestrated.tick("lag")
    assert materialized(orchestrated) == set(), "the run may still live"
    orchestrated.instance.report_run_failed(run)

    requests = orchestrated.tick("lag").run_requests
    (request,) = [each for each in requests if each.job_name == f"{NAME}_snapshot"]
    assert materialized(orchestrated) == {"public.a"}
    assert orchestrated.execute(request, "snapshot").success
    assert materialized(orchestrated) == {"public.a", "public.b"}
    assert records(orchestrated.tick("lag")) == []


@pytest.mark.sampled
def test_the_record_of_a_killed_resnapshot_replaces_the_older_one(
    orchestrated: Orchestrated,
) -> None:
    """So does that of another Dagster instance with the same lake."""
    orchestrated.copy()
    assert records(orchestrated.tick("lag")) == []
    orchestrated.database.execute("insert into a values (11, 'later')")
    capture, zone = orchestrated.capture, orchestrated.zone
    settings, source = orchestrated.database.settings(), (capture.slot, capture.publication)
    snapshot_tables(settings, zone, *source, [capture.tables[0].name])
    (record,) = records(orchestrated.tick("lag"))
    assert record.partition == "public.a"
    assert record.metadata["dagster/partition_row_count"].value == 11
    newest = max(each.snapshot_lsn for each in zone.snapshots.complete_snapshots())
    assert record.metadata["snapshot_lsn"].value == str(newest)
    assert records(orchestrated.tick("lag")) == []


def test_the_records_that_a_person_has_wiped_are_made_again(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lake still has the snapshots, and the assets of the tables depend on them."""
    orchestrated.copy()
    assert records(orchestrated.tick("lag")) == []
    orchestrated.instance.wipe_assets([SNAPSHOT])
    assert records(orchestrated.tick("lag")) == [], "the storage is not read at each tick"
    monkeypatch.setattr(unrecorded_snapshots, "SECONDS", -1.0, raising=False)
    orchestrated.tick("lag")
    assert materialized(orchestrated) == {"public.a", "public.b"}


def materialized(orchestrated: Orchestrated) -> set[str]:
    return orchestrated.instance.get_materialized_partitions(SNAPSHOT)


def records(data: dg.SensorResult) -> list[dg.AssetMaterialization]:
    """Return the copied tables that an evaluation records."""
    events = data.asset_events
    found = [event for event in events if isinstance(event, dg.AssetMaterialization)]
    return [event for event in found if event.asset_key == SNAPSHOT]
