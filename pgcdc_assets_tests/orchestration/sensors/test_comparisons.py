"""The lag sensor's requests of comparisons, and a running Dagster that heals a USING."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.checks.scd import EQUALS_SOURCE
from pgcdc_assets.raw.relations.schema_events import CATALOG, SchemaChange, SchemaEvent
from pgcdc_assets.raw.relations.uncertain_values import conclude
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.orchestration.daemon import SECONDS, running_daemon
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


def _record(orchestrated: Orchestrated, table: str) -> SchemaEvent:
    lsn = Lsn.parse(orchestrated.database.value("select pg_current_wal_lsn()::text"))
    name, change = TableName("public", table), SchemaChange.VALUES_UNCERTAIN
    event = SchemaEvent(1, lsn, name, 7, change, ("v",), "It was rewritten.", False, CATALOG)
    orchestrated.zone.schema_events.record([event])
    return event


def _requests(orchestrated: Orchestrated) -> list[dg.RunRequest]:
    found = orchestrated.tick("lag").run_requests or []
    return [request for request in found if request.job_name == f"{NAME}_checks"]


@pytest.mark.sampled
def test_a_comparison_is_requested_until_it_is_recorded(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    assert _requests(orchestrated) == []
    event = _record(orchestrated, "a")
    (first,) = _requests(orchestrated)
    key = dg.AssetCheckKey(dg.AssetKey([NAME, "scd1", "public", "a"]), EQUALS_SOURCE)
    assert first.asset_check_keys == [key]
    # Dagster subsets the job like this.
    job = orchestrated.location.repository.get_job(f"{NAME}_checks")
    subset = job.get_subset(asset_selection=frozenset(), asset_check_selection=frozenset([key]))
    assert subset.asset_layer.selected_asset_keys == frozenset()
    (again,) = _requests(orchestrated)
    assert again.run_key == first.run_key

    run = orchestrated.start_run("checks", first.tags)
    assert _requests(orchestrated) == []
    orchestrated.instance.report_run_failed(run)
    (second,) = _requests(orchestrated)
    assert second.run_key != first.run_key
    waiting = replace(orchestrated.capture, windows=WindowPolicy(retry_seconds=600))
    assert _requests(replace(orchestrated, capture=waiting)) == []

    orchestrated.zone.schema_events.record([conclude(event, event.lsn, is_equal=True)])
    assert _requests(orchestrated) == []


def test_a_stopped_table_is_compared_when_it_continues(orchestrated: Orchestrated) -> None:
    """The comparison would fail at the change that stops the table."""
    orchestrated.copy()
    _record(orchestrated, "a")
    tables = CdcTable("public", "a", on_schema_change="stop"), orchestrated.capture.tables[1]
    stopping = replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))
    assert _requests(stopping) == []
    assert len(_requests(orchestrated)) == 1


@pytest.mark.sampled
def test_a_table_that_cannot_be_compared_gets_a_snapshot(orchestrated: Orchestrated) -> None:
    tables = CdcTable("public", "a", (2,)), CdcTable("public", "b")
    orchestrated = replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))
    orchestrated.copy()
    event = _record(orchestrated, "a")
    assert _requests(orchestrated) == []
    events = orchestrated.zone.schema_events.read()
    (found,) = [e for e in events if e.needs_snapshot]
    assert (found.table, found.change) == (event.table, SchemaChange.TABLE_REWRITTEN)
    jobs = [request.job_name for request in orchestrated.tick("lag").run_requests]
    assert f"{NAME}_snapshot" in jobs


@pytest.mark.soak
@pytest.mark.spark
def test_a_running_dagster_heals_a_wider_type_with_using(
    orchestrated: Orchestrated, tmp_path: Path
) -> None:
    database, zone = orchestrated.database, orchestrated.zone

    def is_merged() -> bool:
        try:
            return orchestrated.equals_source("a") and orchestrated.equals_source("b")
        except Exception:
            return False

    with running_daemon(orchestrated, tmp_path, "defs = cdc[0]\n"):
        wait_until(is_merged, "the first merge", limit_seconds=SECONDS)
        database.execute("alter table b alter n type numeric(12, 3) using n * 2")
        database.execute("insert into b values (1, 1.5)")
        database.execute("alter table a alter v type varchar using upper(v)")
        wait_until(is_merged, "the healed tables", limit_seconds=SECONDS)
    changes = [(e.table.table, e.change) for e in zone.schema_events.read()]
    # `b` had no rows, so nothing was changed in it.
    assert ("b", SchemaChange.VALUES_CONFIRMED) in changes
    assert ("a", SchemaChange.TABLE_REWRITTEN) in changes
