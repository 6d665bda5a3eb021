"""The lag sensor's requests of re-snapshots, from the events and the snapshots in the lake."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.checks.identities import REPLICA_IDENTITY
from pgcdc_assets.orchestration.sensors.snapshot_requests import EVENT_TAG, REASON_TAG
from pgcdc_assets.raw.relations.schema_events import CATALOG, SchemaChange, SchemaEvent
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = pytest.mark.postgres

RANGE = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")


def record_event(
    orchestrated: Orchestrated,
    table: str = "a",
    change: SchemaChange = SchemaChange.PARTITION_ATTACHED,
) -> SchemaEvent:
    ((lsn,),) = orchestrated.database.query("select pg_current_wal_lsn()::text")
    event = SchemaEvent(
        1,
        Lsn.parse(lsn),
        TableName("public", table),
        7,
        change,
        (),
        "A partition was attached.",
        True,
        CATALOG,
    )
    orchestrated.zone.schema_events.record([event])
    return event


def requests(orchestrated: Orchestrated) -> list[dg.RunRequest]:
    found = orchestrated.tick("lag").run_requests or []
    return [request for request in found if request.job_name == f"{NAME}_snapshot"]


@pytest.mark.sampled
def test_a_snapshot_is_requested_once_per_event_and_retried_until_the_event_is_healed(
    orchestrated: Orchestrated,
) -> None:
    """The events and snapshots in the lake suffice after a kill of the process at any point."""
    orchestrated.copy()
    record_event(orchestrated)
    (first,) = requests(orchestrated)
    assert [first.tags[tag] for tag in RANGE] == ["public.a", "public.a"]
    assert "A partition was attached." in first.tags[REASON_TAG]
    # The process was killed before the request was recorded.
    (again,) = requests(orchestrated)
    assert again.run_key == first.run_key

    run = orchestrated.start_run("snapshot", first.tags)
    assert requests(orchestrated) == [], "one request at a time"
    orchestrated.instance.report_run_failed(run)
    (second,) = requests(orchestrated)
    assert second.run_key != first.run_key
    assert second.tags[EVENT_TAG] == first.tags[EVENT_TAG]

    patient = replace(orchestrated.capture, windows=WindowPolicy(retry_seconds=600))
    waiting = replace(orchestrated, capture=patient)
    assert requests(waiting) == []

    # The request also contains a later event of the table, and an event of the other table.
    record_event(orchestrated, "b")
    (both,) = requests(orchestrated)
    assert [both.tags[tag] for tag in RANGE] == ["public.a", "public.b"]
    assert orchestrated.execute(both, "snapshot").success
    assert requests(orchestrated) == []


@pytest.mark.sampled
def test_attempts_continue_after_the_maximum_count(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc_assets.orchestration.runs.records.MAX_COUNTED", 2)
    orchestrated.copy()
    record_event(orchestrated)
    keys = set()
    for _ in range(5):
        (request,) = requests(orchestrated)
        keys.add(request.run_key)
        run = orchestrated.create_run("snapshot", request.tags)
        orchestrated.instance.report_run_failed(run)
    assert len(keys) == 5


def test_with_ask_no_snapshot_is_requested(orchestrated: Orchestrated) -> None:
    asking = replace(orchestrated.capture, on_schema_change="ask")
    orchestrated = replace(orchestrated, capture=asking)
    orchestrated.copy()
    record_event(orchestrated)
    assert requests(orchestrated) == []


@pytest.mark.sampled
def test_no_snapshot_is_requested_that_would_remove_kept_rows(orchestrated: Orchestrated) -> None:
    """E3: with `keep`, a detachment needs no snapshot, and a later change needs a person."""
    capture = replace(orchestrated.capture, on_detached_partition="keep")
    keeping = replace(orchestrated, capture=capture)
    keeping.copy()
    record_event(keeping, "a", SchemaChange.PARTITION_DETACHED)
    assert requests(keeping) == []
    record_event(keeping, "a")
    record_event(keeping, "b")
    (request,) = requests(keeping)
    assert [request.tags[tag] for tag in RANGE] == ["public.b", "public.b"]
    # The default policy.
    (request,) = requests(orchestrated)
    assert [request.tags[tag] for tag in RANGE] == ["public.a", "public.b"]


@pytest.mark.sampled
def test_a_lost_identity_fails_a_check_before_an_update_fails(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    execute = orchestrated.database.execute
    execute("create unique index other on b (n); alter table b alter n set not null")
    key = dg.AssetCheckKey(dg.AssetKey([NAME, "snapshot"]), REPLICA_IDENTITY)

    def evaluated() -> list[tuple[bool, object]]:
        events = orchestrated.tick("lag", one_shot=True).asset_events
        checks = [event for event in events if isinstance(event, dg.AssetCheckEvaluation)]
        return [
            (check.passed, check.metadata["tables"].value)
            for check in checks
            if check.asset_check_key == key
        ]

    assert evaluated() == []
    for table, lose, restore in (
        ("a", "alter table a replica identity nothing", "alter table a replica identity default"),
        ("a", "alter table a drop constraint a_pkey", "alter table a add primary key (id)"),
        (
            "b",
            "alter table b replica identity using index other; drop index other",
            "alter table b replica identity full",
        ),
    ):
        execute(lose)
        assert evaluated() == [(False, f"public.{table}")]
        assert evaluated() == []
        execute(restore)
        assert evaluated() == [(True, "none")]
