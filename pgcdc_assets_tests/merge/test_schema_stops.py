"""Cases of merge steps that end before schema events, without lake and Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pgcdc_assets.errors import ReplicaIdentityError, SchemaChangeError
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge.plan import Plan, plan_merge
from pgcdc_assets.merge.schema_stops import SchemaStops
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.raw.relations.schema_events import STREAM, SchemaChange, SchemaEvent
from pgcdc_assets.raw.relations.source_relations import SourceRelations
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.keyed_snapshots import snapshots_with_key

TABLE = CdcTable("shop", "items", (1, 2))
WINDOWS = [
    WindowSummary(LsnWindow.of(1, start, start + 100), 1, 1, {"shop.items": {"I": 1}})
    for start in (100, 200, 300)
]
NEWEST = WINDOWS[-1].window
FIRST = Snapshot(1, Lsn(100), "shop", "items", 1, 10)
EVENT = SchemaEvent(
    1, Lsn(248), TABLE.name, 7, SchemaChange.TYPE_CHANGED, ("v",), "It changed.", True, STREAM
)


def _snapshot(lsn: int) -> Snapshot:
    return replace(FIRST, snapshot_lsn=Lsn(lsn))


def _plan(
    zone: RawZone,
    scd: int,
    watermark: int | None,
    snapshots: Sequence[Snapshot] = (FIRST,),
    *,
    target: CdcTable = TABLE,
    is_bounded: bool = False,
    through: LsnWindow = NEWEST,
) -> tuple[Plan, str]:

    def relations(epoch: int) -> SourceRelations:
        return SourceRelations(epoch, snapshots, zone.relations.versions(epoch))

    stops = SchemaStops.read(zone, [target], snapshots, through, relations, is_bounded=is_bounded)
    stops = replace(stops, captured_through=lambda epoch: NEWEST.end)
    mark = None if watermark is None else Position(1, Lsn(watermark))
    usable = list(snapshots)
    if target.needs_key(scd):
        usable = snapshots_with_key(target, snapshots, relations)

    def plan(through: LsnWindow) -> Plan:
        return plan_merge(
            target,
            mark,
            usable,
            lambda epoch: WINDOWS,
            through,
            in_order=target.keeps_history(scd),
            is_bounded=is_bounded,
        )

    return stops.plan(target, scd, mark, plan)


@pytest.fixture
def changed(zone: RawZone) -> RawZone:
    """Return a zone with a schema change at 248 that needs a snapshot."""
    zone.schema_events.record([EVENT])
    return zone


def test_without_events_the_plan_has_the_whole_range(zone: RawZone) -> None:
    plan, waits_for = _plan(zone, 1, 150)
    assert (plan.start, plan.end, plan.is_last, waits_for) == (150, 400, True, "")


@pytest.mark.parametrize("scd", [1, 2])
def test_a_table_folds_only_changes_before_the_event(changed: RawZone, scd: int) -> None:
    plan, waits_for = _plan(changed, scd, 150)
    assert (plan.start, plan.end, plan.is_last) == (150, 247, True)
    assert "type_changed (v) at 0/F8" in waits_for
    first, _ = _plan(changed, scd, None)
    assert (first.snapshot, first.end) == (FIRST, 247)
    for watermark in (247, 300):
        held, waits_for = _plan(changed, scd, watermark)
        assert (held.start, held.end, held.recorded_changes) == (watermark, watermark, 0)
        assert waits_for


@pytest.mark.parametrize("scd", [1, 2])
def test_the_rest_of_an_epoch_ends_before_an_event_without_a_snapshot(
    changed: RawZone, scd: int
) -> None:
    """A table that left the publication gets no snapshot of the next epoch."""
    through = LsnWindow.of(2, 50, 60)
    plan, waits_for = _plan(changed, scd, 150, through=through)
    assert (plan.epoch, plan.start, plan.end, plan.is_last) == (1, 150, 247, True)
    assert "type_changed (v) at 0/F8" in waits_for
    for watermark in (247, 300):
        held, waits_for = _plan(changed, scd, watermark, through=through)
        assert (held.start, held.end, held.recorded_changes) == (watermark, watermark, 0)
        assert waits_for


def test_a_snapshot_after_the_event_is_applied_without_the_changes_in_between(
    changed: RawZone,
) -> None:
    plan, waits_for = _plan(changed, 1, 247, [FIRST, _snapshot(350)])
    assert (plan.snapshot, plan.start, plan.end, waits_for) == (_snapshot(350), 350, 400, "")


def test_a_step_of_a_history_ends_at_the_event_before_the_snapshot(changed: RawZone) -> None:
    """The changes before the event are folded, even if later changes cannot be folded."""
    copies = [FIRST, _snapshot(350)]
    before, waits_for = _plan(changed, 2, 150, copies)
    assert (before.start, before.end, before.is_last, waits_for) == (150, 247, False, "")
    between, _ = _plan(changed, 2, 247, copies)
    assert (between.start, between.end, between.is_last) == (247, 349, False)
    rebuilt, _ = _plan(changed, 2, None, copies, is_bounded=True)
    assert (rebuilt.snapshot, rebuilt.end, rebuilt.is_last) == (FIRST, 247, False)


def test_a_history_waits_for_the_capture_of_changes_before_the_snapshot(
    changed: RawZone,
) -> None:
    copies = [FIRST, _snapshot(500)]
    held, waits_for = _plan(changed, 2, 150, copies)
    assert (held.end, held.snapshot, bool(waits_for)) == (247, None, True)
    current, waits_for = _plan(changed, 1, 150, copies)
    assert (current.snapshot, current.end, waits_for) == (_snapshot(500), 500, "")


def test_a_rebuild_does_not_pass_an_event_without_an_earlier_snapshot(
    changed: RawZone,
) -> None:
    with pytest.raises(SchemaChangeError, match="It changed"):
        _plan(changed, 1, 150, [FIRST, _snapshot(500)], is_bounded=True)


def test_with_ask_no_change_is_folded_before_the_new_snapshot(changed: RawZone) -> None:
    target = replace(TABLE, on_schema_change="ask")
    with pytest.raises(SchemaChangeError, match="pgcdc resnapshot"):
        _plan(changed, 1, 150, target=target)
    plan, waits_for = _plan(changed, 1, 150, [FIRST, _snapshot(350)], target=target)
    assert (plan.snapshot, waits_for) == (_snapshot(350), "")
    # The snapshot exists, so the history does not fail before the snapshot is applied.
    held, waits_for = _plan(changed, 2, 150, [FIRST, _snapshot(500)], target=target)
    assert (held.end, bool(waits_for)) == (247, True)


@pytest.mark.parametrize("scd", [1, 2])
def test_a_change_that_was_merged_does_not_stop_the_table_later(zone: RawZone, scd: int) -> None:
    """The setting was `follow` when the table was merged past the added column."""
    zone.schema_events.record(
        [replace(EVENT, change=SchemaChange.COLUMN_ADDED, needs_snapshot=False)]
    )
    target = replace(TABLE, on_schema_change="stop")
    plan, waits_for = _plan(zone, scd, 300, target=target)
    assert (plan.start, plan.end, plan.is_last, waits_for) == (300, 400, True, "")
    bounded, _ = _plan(zone, scd, 300, target=target, is_bounded=True)
    assert bounded.end == 400
    for watermark in (150, None):
        with pytest.raises(SchemaChangeError, match="column_added"):
            _plan(zone, scd, watermark, target=target)


_KEYED, _KEYLESS = 1, 2


@pytest.fixture
def keyless(zone: RawZone) -> RawZone:
    """A zone with a relation that loses its key at 248 (version 2)."""
    columns = (Column("id", 23, is_key=True, attnum=1, type="int4"),)
    relation = Relation(7, "shop", "items", ReplicaIdentity.DEFAULT, columns, ("id",))
    zone.relations.register(1, relation, Lsn(100))
    without = tuple(replace(column, is_key=False) for column in columns)
    zone.relations.register(1, replace(relation, columns=without, primary_key=()), Lsn(248))
    zone.relations.flush()
    zone.schema_events.record([_key_event(248)])
    return zone


def _key_event(lsn: int) -> SchemaEvent:
    change = SchemaChange.KEY_CHANGED
    return SchemaEvent(1, Lsn(lsn), TABLE.name, 7, change, (), "It changed.", True, STREAM)


def _copied(lsn: int, version: int) -> Snapshot:
    return replace(FIRST, snapshot_lsn=Lsn(lsn), relation_version=version, relation_id=7)


@pytest.mark.parametrize("key", [None, ("id",)])
def test_a_history_stops_before_a_snapshot_without_a_key(
    keyless: RawZone, key: tuple[str, ...] | None
) -> None:
    target = replace(TABLE, key=key)
    copies = [_copied(100, _KEYED), _copied(300, _KEYLESS)]
    plan, _ = _plan(keyless, 1, 150, copies, target=target)
    assert (plan.snapshot, plan.start, plan.end) == (copies[1], 300, 400)
    before, waits_for = _plan(keyless, 2, 150, copies, target=target)
    assert (before.start, before.end, before.is_last) == (150, 247, False)
    assert "key_changed at 0/F8" in waits_for
    for scd, changed in ((2, target), (1, replace(target, soft_deletes=True))):
        with pytest.raises(ReplicaIdentityError, match=r"shop\.items has .*ADD PRIMARY KEY"):
            _plan(keyless, scd, 247, copies, target=changed)
    with pytest.raises(ReplicaIdentityError, match="ADD PRIMARY KEY"):
        _plan(keyless, 2, None, copies[1:], target=target)


def test_a_history_waits_for_the_snapshot_with_the_key_that_is_back(keyless: RawZone) -> None:
    keyless.schema_events.record([_key_event(320)])
    copies = [_copied(100, _KEYED), _copied(300, _KEYLESS)]
    held, waits_for = _plan(keyless, 2, 247, copies)
    assert (held.start, held.end, held.is_last) == (247, 247, True)
    assert waits_for
    # The changes in between may have no key: the next step ends before the next event.
    healed, waits_for = _plan(keyless, 2, 247, [*copies, _copied(350, _KEYED)])
    assert (healed.snapshot, healed.start, healed.end) == (None, 247, 319)
    assert (healed.is_last, waits_for) == (False, "")
    # The snapshot is there, and the changes before it are not captured.
    held, waits_for = _plan(keyless, 2, 247, [*copies, _copied(500, _KEYED)])
    assert (held.end, bool(waits_for)) == (247, True)
    rebuilt, _ = _plan(keyless, 2, None, [*copies, _copied(350, _KEYED)], is_bounded=True)
    assert (rebuilt.snapshot, rebuilt.end) == (copies[0], 247)
