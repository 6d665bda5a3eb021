"""The checks of a captured window: each check fails if its subject is damaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest
from deltalake import DeltaTable

from pgcdc_assets.capture.report import CaptureReport
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.orchestration.checks.raw import (
    COUNTED_AS_DECODED,
    NO_PARKED_ROWS,
    WITHOUT_GAPS,
    check_windows,
)
from pgcdc_assets.raw.changes import Recount
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.relations.schema_events import STREAM, SchemaChange, SchemaEvent
from pgcdc_assets.raw.snapshots import Snapshot, SnapshotStore
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.orchestration.conftest import Orchestrated
from pgcdc_assets_tests.support.raw.epochs import EPOCH

RAW = dg.AssetKey(["t", "raw"])


@pytest.mark.sampled
@pytest.mark.postgres
@pytest.mark.parametrize(
    ("damage", "lost"), [("op = 'I' AND ordinal = 1", {"I": (3, 2)}), ("op = 'D'", {"D": (1, 0)})]
)
def test_a_lost_row_of_a_new_window_fails_the_run_and_its_check(
    orchestrated: Orchestrated,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
    lost: dict[str, tuple[int, int]],
) -> None:
    orchestrated.copy()
    orchestrated.database.transaction(
        "insert into b select n, n from generate_series(1, 3) n", "delete from b where id = 2"
    )

    land = CaptureSession.land

    def capture_and_lose(session: CaptureSession, window: LsnWindow) -> CaptureReport:
        report = land(session, window)
        table = orchestrated.zone.changes.table.load()
        assert table is not None
        table.delete(damage)
        return report

    monkeypatch.setattr(CaptureSession, "land", capture_and_lose)
    (request,) = orchestrated.tick("lag", one_shot=True).run_requests
    result = orchestrated.execute(request, "capture")
    assert not result.success
    assert not result.get_asset_materialization_events()
    checks = {check.check_name: check for check in result.get_asset_check_evaluations()}
    assert checks[WITHOUT_GAPS].passed
    assert not checks[COUNTED_AS_DECODED].passed
    description = str(checks[COUNTED_AS_DECODED].description)
    assert description.endswith(f"pgcdc resnapshot {orchestrated.zone.name} public.b")
    metadata: Mapping[str, Any] = checks[COUNTED_AS_DECODED].metadata
    assert "rows landed" in str(metadata["reason"].value)
    assert metadata["decoded_row_count"].value == metadata["row_count"].value + 1
    assert {name: pair for name, pair in operations(metadata).items() if pair[0] != pair[1]} == lost


def operations(metadata: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the decoded and the found rows by operation."""
    records = [record.data for record in metadata["operations"].records]
    return {r["operation"]: (int(r["decoded"]), int(r["found"])) for r in records}


def test_equal_counts_of_other_operations_fail_the_check(zone: RawZone) -> None:
    window = LsnWindow.of(1, 100, 200)
    decoded = WindowSummary(window, 2, 1, {"s.t": {"I": 1, "U": 1}})
    found = WindowSummary(window, 2, 1, {"s.t": {"I": 2}})
    whole, damaged = Recount(decoded, decoded, Lsn(200)), Recount(decoded, found, Lsn(200))
    results = {
        is_damaged: {r.check_name: r for r in check_windows(zone, RAW, [whole, last])}
        for is_damaged, last in ((False, whole), (True, damaged))
    }
    assert results[False][COUNTED_AS_DECODED].passed
    assert not results[True][COUNTED_AS_DECODED].passed


@pytest.mark.parametrize(
    ("lost", "holes"),
    [
        ((), "none"),
        ((100,), "none"),
        ((300,), "0/12C to 0/190"),
        ((100, 200, 300), "0/64 to 0/190"),
        ((400,), "0/190 to 0/1F4"),
    ],
)
def test_a_lost_window_directly_before_or_after_a_window_fails_its_check(
    zone: RawZone, lost: tuple[int, ...], holes: str
) -> None:
    """A check compares a window with its neighbours: the check of each window covers the rest."""
    zone.epochs.append(replace(EPOCH, start_lsn=Lsn(100)))
    for start in range(100, 600, 100):
        zone.changes.land(LsnWindow.of(1, start, start + 100), [])
    maintain_raw_zone(zone, minimum_log_entries=1)
    for start in lost:
        DeltaTable(zone.changes.window_index.table.uri).delete(f"start_lsn = {start}")
    first = 400 if 400 not in lost else 500
    summary = WindowSummary(LsnWindow.of(1, first, first + 100))
    (result, *_) = check_windows(zone, RAW, [Recount(summary, summary, Lsn(600))])
    assert result.metadata["holes"] == dg.TextMetadataValue(holes)
    assert result.passed == (holes == "none")
    remedy = None if result.passed else "pgcdc resnapshot test"
    assert (result.description and result.description.rpartition(": ")[2]) == remedy


def test_a_parked_row_fails_its_check_until_a_snapshot_has_the_row(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, other = TableName("shop", "orders"), TableName("shop", "not declared")
    zone.schema_events.record(
        SchemaEvent(1, Lsn(lsn), table, 16400, SchemaChange.ROW_PARKED, (), "3 rows", True, STREAM)
        for table, lsn in ((orders, 120), (orders, 150), (other, 400))
    )
    window = LsnWindow.of(1, 100, 200)
    counts = {"shop.orders": {"I": 1, "P": 3}}
    decoded = WindowSummary(window, 4, 1, counts)
    recount = Recount(decoded, decoded, Lsn(200))

    def check(copied: int) -> dg.AssetCheckResult:
        snapshot = Snapshot(1, Lsn(copied), *orders, relation_version=1, row_count=3)
        monkeypatch.setattr(SnapshotStore, "complete_snapshots", lambda store: [snapshot])
        results = check_windows(zone, RAW, [recount], [orders])
        return next(result for result in results if result.check_name == NO_PARKED_ROWS)

    for copied in (100, 130, 150):
        failed = check(copied)
        assert not failed.passed
        assert failed.metadata["tables"] == dg.TextMetadataValue("shop.orders")
        assert failed.metadata["reason"] == dg.TextMetadataValue("shop.orders: 3 rows")
        assert failed.metadata["parked_row_count"] == dg.FloatMetadataValue(3.0)
        assert str(failed.description).endswith("pgcdc resnapshot test shop.orders")
    healed = check(151)
    assert healed.passed
    assert healed.metadata["tables"] == dg.TextMetadataValue("none")
