"""The position at which schema events stop a table, by policy and watermark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.errors import SchemaChangeError
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.raw.relations.schema_events import CATALOG, STREAM, SchemaChange, SchemaEvent
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.schema_gate import SchemaGate, find_gates, record_unforeseen
from pgcdc_assets_tests.support.raw.rows import batch, change, relation, window

NAME = TableName("shop", "orders")
TABLE = CdcTable(*NAME)
EVENT = SchemaEvent(
    1, Lsn(160), NAME, 7, SchemaChange.TYPE_CHANGED, ("v",), "It changed.", True, STREAM
)
ADDED = replace(EVENT, lsn=Lsn(80), change=SchemaChange.COLUMN_ADDED, needs_snapshot=False)


def _gate(policy: str | None, *snapshots: Snapshot) -> SchemaGate | None:
    table = replace(TABLE, on_schema_change=policy)
    return find_gates([table], [EVENT, ADDED], snapshots).get(NAME)


def _snapshot(lsn: int) -> Snapshot:
    return Snapshot(1, Lsn(lsn), *NAME, relation_version=1, row_count=0)


def test_by_default_a_table_waits_before_an_event_that_needs_a_snapshot() -> None:
    gate = _gate(None)
    assert gate is not None
    assert (gate.heals, gate.hold, gate.newest) == (True, (1, 159), EVENT)
    assert not gate.is_reached(Position(1, Lsn(160)))
    assert gate.is_reached(Position(1, Lsn(161)))
    assert not gate.is_reached(Position(2, Lsn(161)))
    assert gate.error(NAME, Position(1, Lsn(200))) is None
    assert _gate(None, _snapshot(168)) is None
    # The table of this event is not declared.
    assert find_gates([CdcTable("shop", "other")], [EVENT], []) == {}


def test_with_ask_a_merge_stops_at_the_event() -> None:
    gate = _gate("ask")
    assert gate is not None
    assert gate.error(NAME, Position(1, Lsn(160))) is None
    error = gate.error(NAME, Position(1, Lsn(161)))
    assert isinstance(error, SchemaChangeError)
    assert str(error) == (
        "Table shop.orders, column v: It changed (type_changed at 0/A0). Take a new snapshot with: "
        "pgcdc resnapshot NAME shop.orders"
    )
    passed = gate.after(Position(1, Lsn(200)))
    assert passed == gate, "a merge with another setting has passed an event without its snapshot"


def test_stop_counts_replayable_events_that_the_table_has_not_passed() -> None:
    gate = _gate("stop")
    assert gate is not None
    assert [event.lsn for event in gate.events] == [80, 160]
    through = Position(1, Lsn(100))
    error = gate.error(NAME, through)
    assert error is not None
    assert "column_added" in str(error)
    for before in (None, Position(1, Lsn(50)), Position(1, Lsn(79))):
        assert gate.after(before) == gate
    for passed in (80, 90, 300):
        left = gate.after(Position(1, Lsn(passed)))
        assert left is not None
        assert (left.events, left.error(NAME, through)) == ((EVENT,), None)
    after = _gate("stop", _snapshot(96))
    assert after is not None
    assert [event.lsn for event in after.events] == [160]
    assert gate.error(NAME, Position(1, Lsn(80))) is None
    seen = replace(gate, events=(replace(ADDED, found_by=CATALOG),))
    at = Position(1, Lsn(80))
    assert seen.is_reached(at), "the change is below the LSN of a look"
    assert seen.error(NAME, at) is not None
    assert seen.error(NAME, Position(1, Lsn(79))) is None
    added = replace(gate, events=(ADDED,))
    assert added.after(Position(1, Lsn(80))) is None


@pytest.mark.parametrize(
    ("on_schema_change", "on_poisoned_row", "changes", "heals"),
    [
        (None, None, (SchemaChange.ROW_PARKED,), True),
        (None, "stop", (SchemaChange.ROW_PARKED,), False),
        ("stop", None, (SchemaChange.ROW_PARKED,), True),
        ("ask", "rescue", (SchemaChange.ROW_PARKED, SchemaChange.TYPE_CHANGED), False),
        (None, "stop", (SchemaChange.TYPE_CHANGED,), True),
        (None, "stop", (SchemaChange.TYPE_CHANGED, SchemaChange.ROW_PARKED), False),
    ],
)
def test_the_setting_for_parked_rows_stops_the_table(
    on_schema_change: str | None,
    on_poisoned_row: str | None,
    changes: tuple[SchemaChange, ...],
    heals: bool,
) -> None:
    table = replace(TABLE, on_schema_change=on_schema_change, on_poisoned_row=on_poisoned_row)
    events = [replace(EVENT, change=change, lsn=Lsn(160 + i)) for i, change in enumerate(changes)]
    gate = find_gates([table], events, []).get(NAME)
    assert gate is not None
    assert (gate.heals, gate.hold) == (heals, (1, 159))
    error = gate.error(NAME, Position(1, Lsn(200)))
    assert (error is None) == heals
    assert find_gates([table], events, [_snapshot(176)]) == {}


DETACHED = replace(EVENT, lsn=Lsn(120), change=SchemaChange.PARTITION_DETACHED, found_by=CATALOG)
KEEPER = replace(TABLE, on_detached_partition="keep")


def test_a_table_that_keeps_detached_partitions_does_not_wait() -> None:
    """E3: the rows of partitions that never had a row are not kept rows."""
    unused = replace(DETACHED, needs_snapshot=False)
    for events in ([DETACHED], [ADDED, DETACHED], [unused]):
        assert find_gates([KEEPER], events, []) == {}
    gate = find_gates([TABLE], [DETACHED], []).get(NAME)
    assert gate is not None and gate.heals
    gate = find_gates([KEEPER], [unused, EVENT], []).get(NAME)
    assert gate is not None and gate.heals


def test_a_snapshot_that_would_remove_kept_rows_needs_a_person() -> None:
    """E3: the first snapshot after the detachment ends the protection."""
    gate = find_gates([KEEPER], [DETACHED, EVENT], []).get(NAME)
    assert gate is not None
    assert (gate.heals, gate.hold) == (False, (1, 159))
    error = gate.error(NAME, Position(1, Lsn(200)))
    assert isinstance(error, SchemaChangeError)
    assert "removes these rows. Take a new snapshot with" in str(error)
    assert gate.reason.endswith("removes these rows.")
    stopping = replace(KEEPER, on_schema_change="stop")
    gate = find_gates([stopping], [ADDED, DETACHED], []).get(NAME)
    assert gate is not None
    assert gate.events == (ADDED,)
    gate = find_gates([KEEPER], [DETACHED, EVENT], [_snapshot(120)]).get(NAME)
    assert gate is not None and gate.heals


def _error(column: str = "v") -> SchemaChangeError:
    return SchemaChangeError(relation="shop.orders", column=column, reason="its type changed")


def test_an_unrecorded_change_is_recorded_once_for_each_version(
    zone: RawZone,
) -> None:
    """The newest version comes first. A snapshot that does not heal is not repeated."""
    through = LsnWindow.of(1, 0, 400)
    used = [(96, 1), (152, 1), (200, 2), (256, 2), (304, 3)]
    rows = [change(lsn, relation_id=7, relation_version=version) for lsn, version in used]
    zone.changes.land(window(90, 400), [batch(*rows)])
    for lsn, names in ((96, ("id", "a")), (200, ("id", "b")), (304, ("id", "c"))):
        zone.relations.register(1, relation("orders", 7, *names), Lsn(lsn))
    zone.relations.register(1, relation("users", 8), Lsn(320))
    zone.relations.flush()
    zone.snapshots.land_snapshot(1, Lsn(96), relation("orders", 7, "id", "a"), 1, [])

    first = record_unforeseen(zone, NAME, _error(), through)
    assert first is not None
    assert (first.lsn, first.columns, first.found_by, first.needs_snapshot) == (
        304,
        ("v",),
        "merge",
        True,
    )
    assert "its type changed" in first.detail
    second = record_unforeseen(zone, NAME, _error(), through)
    assert second is not None
    assert second.lsn == 200
    # The relation version of the snapshot cannot be the reason.
    assert record_unforeseen(zone, NAME, _error(), through) is None
    assert [event.lsn for event in zone.schema_events.read()] == [200, 304]

    zone.snapshots.land_snapshot(1, Lsn(312), relation("orders", 7, "id", "c"), 3, [])
    assert find_gates([TABLE], zone.schema_events.read(), zone.snapshots.complete_snapshots()) == {}
    assert record_unforeseen(zone, NAME, _error("w"), through) is None


def test_a_version_that_a_snapshot_above_the_merge_registered_is_held_at_its_first_row(
    zone: RawZone,
) -> None:
    """A poll of the catalog caused the snapshot before the rows of the version were captured."""
    zone.relations.register(1, relation("orders", 7, "id", "a"), Lsn(96))
    zone.relations.register(1, relation("orders", 7, "id", "b"), Lsn(304))
    zone.relations.flush()
    for lsn, version in ((96, 1), (304, 2)):
        zone.snapshots.land_snapshot(1, Lsn(lsn), relation("orders", 7), version, [])
    rows = [change(lsn, relation_id=7, relation_version=2) for lsn in (208, 200)]
    zone.changes.land(window(90, 250), [batch(*rows)])
    event = record_unforeseen(zone, NAME, _error(), LsnWindow.of(1, 0, 250))
    assert event is not None
    assert event.lsn == 200
    assert record_unforeseen(zone, NAME, _error(), LsnWindow.of(1, 0, 400)) is None


@pytest.mark.parametrize("end", [160, 161])
def test_an_event_of_the_catalog_is_healed_by_a_snapshot_at_its_lsn(end: int) -> None:
    event = replace(EVENT, found_by=CATALOG)
    assert find_gates([TABLE], [event], [_snapshot(end)]) == {}


def test_a_version_that_is_used_again_after_a_snapshot_is_recorded_a_few_times(
    zone: RawZone,
) -> None:
    """F9: the source was altered, was snapshot, and was altered back."""
    for lsn, names in ((96, ("id", "a")), (200, ("id", "b"))):
        zone.relations.register(1, relation("orders", 7, *names), Lsn(lsn))
    zone.relations.flush()
    start, found = 90, list[Lsn]()
    for turn in range(4):
        at = 208 + 100 * turn
        rows = [change(at + 48, relation_id=7, relation_version=1)]
        zone.changes.land(window(start, at + 96), [batch(*rows)])
        start = at + 96
        zone.snapshots.land_snapshot(1, Lsn(at), relation("orders", 7, "id", "b"), 2, [])
        event = record_unforeseen(zone, NAME, _error(), LsnWindow.of(1, 0, start))
        found += [] if event is None else [event.lsn]
    assert found == [256, 356, 456]
