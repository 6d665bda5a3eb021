"""The progress of a capture and its tables, read from the lake; no cursor is stored.

A merge does not move the watermarks of idle tables each time. A table is therefore merged through
the end of the raw zone if no landed window above its watermark has a change of the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.relations.schema_events import SchemaEvent
from pgcdc_assets.raw.relations.source_relations import SourceRelations
from pgcdc_assets.raw.relations.uncertain_values import find_uncertain_values
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.table_list import ListedState
from pgcdc_assets.raw.table_threads import map_tables
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.keyed_snapshots import newest_without_key
from pgcdc_assets.tables.schema_gate import SchemaGate, find_gates, gate_after, read_gate
from pgcdc_assets.tables.state import read_watermark
from pgcdc_assets.tables.tables_ahead import RawEnd


@dataclass(frozen=True)
class TableState:
    """The progress of one SCD table.

    Attributes:
        watermark: the watermark of the SCD table; None before its first merge.
        merged_through: the end of the raw zone if no change waits, else the watermark.
        snapshot_at: the position of the newest complete snapshot; None without a snapshot.
        partial_at: the position of the newest partial snapshot that a merge can apply, because all
            earlier changes are captured; None without a snapshot.
        waiting_changes: landed changes that are not merged.
        is_broken: the SCD table cannot be read, or is ahead of the raw zone, as after a restore;
            its merge raises the error, and other tables are merged.
        gate: the open schema events of the table; None without an open event.
        is_stopped: the table's setting is `ask` or `stop`, and an open schema event stops the
            table until a person takes a new snapshot; or the table needs a key, and has lost it.
            Its merge raises the error.
        is_held: the table waits before a schema event for the snapshot. A table with history then
            also waits for the capture of all changes before the snapshot.
        has_waiting_snapshot: the next merge can apply a snapshot that is not merged. A table that
            is held can apply those before the event only.
        has_left: the capture follows its publication, and the table left the publication.
    """

    table: CdcTable
    scd: int
    watermark: Position | None
    merged_through: Position | None
    snapshot_at: Position | None
    waiting_changes: int
    is_broken: bool = False
    gate: SchemaGate | None = None
    is_stopped: bool = False
    is_held: bool = False
    has_left: bool = False
    partial_at: Position | None = None
    has_waiting_snapshot: bool = False

    @property
    def is_healing(self) -> bool:
        """Whether the table waits for an automatic re-snapshot."""
        return self.gate is not None and self.gate.heals and not self.has_left

    @property
    def needs_merge(self) -> bool:
        """Whether a first snapshot, changes or a newer snapshot wait for a merge."""
        if self.snapshot_at is None:
            # A table that left has no snapshot of a later epoch, and may lack changes before it.
            is_behind = self.watermark is not None and self.waiting_changes > 0
            return self.has_left and is_behind and not self.is_stopped
        if self.is_broken or self.is_stopped:
            return True
        return self.watermark is None or self.waiting_changes > 0 or self.has_waiting_snapshot


@dataclass(frozen=True)
class CaptureState:
    """The progress of a capture and its tables."""

    epoch: Epoch | None
    captured_through: Position | None
    tables: tuple[TableState, ...] = ()

    @property
    def merged_through(self) -> Position | None:
        """The lowest `merged_through` of all tables; None if a table was never merged."""
        if not self.tables:
            return self.captured_through
        merged = [table.merged_through for table in self.tables]
        known = [position for position in merged if position is not None]
        return min(known) if known and len(known) == len(merged) else None


def watermarks(zone: RawZone, table: CdcTable) -> list[Position]:
    """Return the watermarks of a table's SCD tables that exist and can be read.

    The merge of an unreadable table raises the error.
    """
    marks = []
    for scd in table.scd:
        with contextlib.suppress(PgcdcError):
            marks.append(_watermark(zone, table, scd))
    return [mark for mark in marks if mark is not None]


def lowest_watermark(zone: RawZone, table: CdcTable) -> Position | None:
    """Return the lowest watermark of a table; None if one of its SCD tables has none."""
    marks = watermarks(zone, table)
    return min(marks) if marks and len(marks) == len(table.scd) else None


def captured_through(zone: RawZone, epoch: Epoch) -> Position:
    """Return the end of the raw zone: the end of the newest window, else the epoch's start."""
    return Position(epoch.epoch, zone.changes.captured_through(epoch.epoch) or epoch.start_lsn)


def newest_snapshots(zone: RawZone, epoch: Epoch) -> dict[TableName, Position]:
    """Return the position of the newest complete snapshot of each table in an epoch.

    Snapshots of earlier epochs do not count, because the raw zone lacks the changes between two
    epochs.
    """
    return _newest_of(zone.snapshots.complete_snapshots(epoch.epoch))


def _newest_of(snapshots: Iterable[Snapshot]) -> dict[TableName, Position]:
    newest: dict[TableName, Position] = {}
    for copy in snapshots:
        newest[copy.name] = max(copy.position, newest.get(copy.name, copy.position))
    return newest


def left_tables(zone: RawZone, capture: CdcCapture) -> dict[TableName, str]:
    """Return the tables that left the publication which the capture follows, with the reason."""
    if capture.selection is None:
        return {}
    return {table.name: table.reason for table in zone.table_list.read().of_state(ListedState.LEFT)}


def find_uncertain_tables(zone: RawZone, capture: CdcCapture) -> dict[CdcTable, SchemaEvent]:
    """Return the tables whose values wait for a comparison, each with its event.

    A table that waits for a person cannot be compared: the comparison would pass the change.
    """
    events = zone.schema_events.read()
    if not events:
        return {}
    uncertain = find_uncertain_values(events, zone.snapshots.complete_snapshots(), capture.keepers)
    if not uncertain:
        return {}
    left = left_tables(zone, capture)
    stopped = {name for name, gate in read_gates(zone, capture).items() if not gate.heals}
    return {
        table: uncertain[table.name]
        for table in capture.tables
        if table.name in uncertain and table.name not in left and table.name not in stopped
    }


def read_gates(zone: RawZone, capture: CdcCapture) -> dict[TableName, SchemaGate]:
    """Read the open schema events of the declared tables, by the lowest watermark of each table."""
    gates, found = _gates(zone, capture, None)[0], {}
    for table in capture.tables:
        gate = gates.get(table.name)
        if gate is None:
            continue
        is_passable = any(not event.needs_snapshot for event in gate.events)
        left = gate.after(lowest_watermark(zone, table)) if is_passable else gate
        if left is not None:
            found[table.name] = left
    return found


def _gates(
    zone: RawZone, capture: CdcCapture, through: Position | None
) -> tuple[dict[TableName, SchemaGate], dict[TableName, SchemaGate]]:
    """Return the open events of the tables, and the open events as of a position.

    The second mapping ignores snapshots above the position.
    """
    events = zone.schema_events.read()
    if not events:
        return {}, {}
    snapshots = zone.snapshots.complete_snapshots()
    gates = find_gates(capture.tables, events, snapshots)
    if through is None:
        return gates, gates
    reached = [snapshot for snapshot in snapshots if snapshot.position <= through]
    return gates, find_gates(capture.tables, events, reached)


def read_state(zone: RawZone, capture: CdcCapture) -> CaptureState:
    """Read the progress of a capture and its tables."""
    epoch = zone.epochs.latest()
    if epoch is None:
        return CaptureState(None, None)
    through = captured_through(zone, epoch)
    copies = newest_snapshots(zone, epoch)
    partials = _newest_of(
        s for s in zone.partial_snapshots.complete_snapshots(epoch.epoch) if s.position <= through
    )
    broken: set[tuple[CdcTable, int]] = set()

    def read(place: tuple[CdcTable, int]) -> Position | None:
        try:
            return _watermark(zone, *place)
        except PgcdcError:
            broken.add(place)
            return None

    places = [(table, scd) for table in capture.tables for scd in table.scd]
    positions = dict(zip(places, map_tables(zone.lake, places, read), strict=True))
    windows = _windows_above(zone, epoch, positions.values())
    gates, unreached = _gates(zone, capture, through)
    names = _NamesAtSource(zone)
    left = left_tables(zone, capture)
    read_end = cache(partial(RawEnd.read, zone))
    states = []
    for (table, scd), watermark in positions.items():
        gate = gate_after(gates, table.name, watermark)
        is_stopped = gate is not None and gate.error(table.name, through) is not None
        in_order = table.keeps_history(scd) and watermark is not None
        held = gate_after(unreached, table.name, watermark) if in_order else gate
        copied, partial_at = copies.get(table.name), partials.get(table.name)
        has_lost_key = False
        if in_order and table.needs_key(scd) and _is_before(watermark, copied):
            # A snapshot without a key is no snapshot for this table.
            held = read_gate(zone, table, scd, watermark, through)
            has_lost_key = _has_lost_key(zone, table)
            is_reached = held is None or held.is_reached(through)
            is_stopped |= is_reached and gate is None and has_lost_key
        is_held = held is not None and not is_stopped and held.is_reached(through)
        reachable = held.hold if held is not None and is_held else through
        has_waiting_snapshot = any(
            _is_before(watermark, at) and (not is_held or (at <= reachable and not has_lost_key))
            for at in (copied, partial_at)
            if at is not None
        )
        waiting = 0
        has_left = table.name in left
        if watermark is not None:
            if has_left and copied is None:
                reachable = min(reachable, Position(watermark.epoch + 1, Lsn(0)))
                if gate is not None:
                    # No snapshot heals the event any more, so the table ends before it.
                    reachable = min(reachable, gate.hold)
            waiting = _changes_between(windows, names, table, watermark, reachable)
        merged = watermark
        if watermark is not None and waiting == 0 and not is_stopped:
            merged = max(watermark, reachable)
        if has_left and waiting == 0 and not is_stopped:
            # The table waits for a snapshot that is never taken.
            merged = through
        is_broken = (table, scd) in broken or _is_ahead(table, watermark, through, read_end)
        states.append(
            TableState(
                table,
                scd,
                watermark,
                merged,
                copied,
                waiting,
                is_broken,
                gate,
                is_stopped,
                is_held,
                has_left,
                partial_at,
                has_waiting_snapshot,
            )
        )
    return CaptureState(epoch, through, tuple(states))


def _is_before(watermark: Position | None, copied: Position | None) -> bool:
    return watermark is not None and copied is not None and watermark < copied


def _is_ahead(
    table: CdcTable,
    watermark: Position | None,
    through: Position,
    read_end: Callable[[], RawEnd | None],
) -> bool:
    """Return whether the raw zone is older than a table.

    Args:
        through: an earlier reading of the end of the captured windows.
        read_end: reads the end of the raw zone; not called unless the watermark is above `through`.
    """
    if watermark is None or watermark <= through:
        return False
    end = read_end()
    return end is not None and watermark > end.of(table.name)


def _has_lost_key(zone: RawZone, table: CdcTable) -> bool:
    """Return whether the newest snapshot of a table has no key."""
    snapshots = zone.snapshots.complete_snapshots()
    return newest_without_key(table, snapshots, cache(zone.source_relations)) is not None


def _watermark(zone: RawZone, table: CdcTable, scd: int) -> Position | None:
    return read_watermark(zone.lake, zone.name, table.schema, table.table, scd)


def _windows_above(
    zone: RawZone, epoch: Epoch, watermarks: Iterable[Position | None]
) -> list[WindowSummary]:
    known = [mark for mark in watermarks if mark is not None]
    if not known:
        return []
    lowest = min(known)
    found: list[WindowSummary] = []
    for number in range(lowest.epoch, epoch.epoch + 1):
        since = lowest.lsn if number == lowest.epoch else None
        found += zone.changes.windows(number, since)
    return found


class _NamesAtSource:
    """The names of declared tables in the windows of an epoch. A renamed table has several."""

    def __init__(self, zone: RawZone) -> None:
        self._zone = zone
        self._relations: dict[int, SourceRelations] = {}

    def of(self, table: CdcTable, epoch: int) -> frozenset[TableName]:
        if epoch not in self._relations:
            self._relations[epoch] = self._zone.source_relations(epoch)
        return self._relations[epoch].names(table.name)


def _changes_between(
    windows: Sequence[WindowSummary],
    names: _NamesAtSource,
    table: CdcTable,
    mark: Position,
    end: Position,
) -> int:
    """Count the changes in windows that overlap a range."""
    if mark >= end:
        return 0
    crossed = [
        summary
        for summary in windows
        if summary.window.end_position > mark and (summary.window.epoch, summary.window.start) < end
    ]
    known = {epoch: names.of(table, epoch) for epoch in {w.window.epoch for w in crossed}}
    return sum(summary.count_changes(known[summary.window.epoch]) for summary in crossed)
