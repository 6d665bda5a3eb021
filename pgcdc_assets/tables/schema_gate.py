"""The open events at which a table stops: schema changes and parked rows.

The settings `on_schema_change` and `on_poisoned_row` determine whether the table waits for an
automatic snapshot or for a person. A table that has kept rows of detached partitions
(`on_detached_partition`) waits for a person: a snapshot removes these rows.

The merge, the sensors and the commands derive the stop from the events and snapshots in the lake,
so a killed process leaves nothing to repair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pyarrow as pa

from pgcdc_assets.errors import PgcdcError, SchemaChangeError
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.relations.schema_events import (
    CATALOG,
    MERGE,
    SchemaChange,
    SchemaEvent,
    kept_partitions,
    open_events,
)
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import ASK, FOLLOW, SCHEMA_POLICIES, STOP
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.keyed_snapshots import snapshots_with_key

# The column of an error about the whole table.
ALL_COLUMNS = "(all)"
KEPT_ROWS = (
    "The table has kept rows of detached partitions (on_detached_partition), and a new snapshot "
    "removes these rows."
)
# Events that merges record for one relation version. The source may alter a table back repeatedly.
_EVENTS_OF_VERSION = 3


class RecordedSchemaChange(SchemaChangeError):
    """The raw zone has a schema event of the change, so a sensor requests what heals the table."""


@dataclass(frozen=True)
class SchemaGate:
    """The open schema events of one table, oldest first.

    Attributes:
        policy: the table's setting `on_schema_change`; if the table has parked rows only, what
            `on_poisoned_row` means as such a setting; the stricter one of both. `follow` is `ask`
            for a table that has kept rows of detached partitions.
        has_kept_rows: the table has kept rows of detached partitions.
    """

    policy: str
    events: tuple[SchemaEvent, ...]
    has_kept_rows: bool = False

    @property
    def heals(self) -> bool:
        """Whether the table waits for an automatic snapshot, instead of a person."""
        return self.policy == FOLLOW

    @property
    def hold(self) -> Position:
        """The highest watermark of a table that waits."""
        return hold_of(self.events[0])

    def after(self, watermark: Position | None) -> SchemaGate | None:
        """Return the gate of a table with a watermark; None if the table has passed all events.

        A replayable event up to the watermark was merged under another setting.

        Args:
            watermark: None before the first merge.
        """
        if watermark is None:
            return self
        left = tuple(e for e in self.events if e.needs_snapshot or e.position > watermark)
        return replace(self, events=left) if left else None

    def is_reached(self, through: Position) -> bool:
        """Return whether a merge of the same epoch would pass the first event."""
        first = self.events[0]
        return first.epoch == through.epoch and _is_passed(first, through)

    @property
    def newest(self) -> SchemaEvent:
        """The last event: a snapshot that heals it heals all."""
        return max(self.events, key=lambda event: event.position)

    @property
    def reason(self) -> str:
        """A sentence about each event."""
        kept = [KEPT_ROWS] if self.has_kept_rows else []
        return " ".join([*map(describe_event, self.events), *kept])

    def error(self, table: TableName, through: Position) -> SchemaChangeError | None:
        """Return the error of a merge that would pass an event which a person has to look at.

        Args:
            through: the end of the merge.
        """
        for event in () if self.heals else self.events:
            if _is_passed(event, through):
                return schema_change_error(table, event, has_kept_rows=self.has_kept_rows)
        return None


def _is_passed(event: SchemaEvent, through: Position) -> bool:
    """Return whether a merge through a position passes an event.

    A look has the LSN of the WAL's end, which is often the end of a window too. A replayable change
    is below, while a snapshot at the LSN heals the others.
    """
    if event.found_by == CATALOG and not event.needs_snapshot:
        return event.position <= through
    return event.position < through


def hold_of(event: SchemaEvent) -> Position:
    """Return the position right before an event.

    The position is one byte before the event: a watermark at the LSN of a snapshot would mean that
    the snapshot is in the table. Commit records begin at multiples of eight, so no commit is in
    between.
    """
    return Position(event.epoch, Lsn(max(0, event.lsn - 1)))


def find_gates(
    tables: Iterable[CdcTable], events: Iterable[SchemaEvent], snapshots: Iterable[Snapshot]
) -> dict[TableName, SchemaGate]:
    """Find the tables with open schema events."""
    declared = {table.name: table for table in tables}
    stopped = [name for name, table in declared.items() if table.schema_policy == STOP]
    keepers = [name for name, table in declared.items() if table.keeps_partitions]
    events, snapshots = list(events), list(snapshots)
    found = open_events(events, snapshots, replayable_of=stopped, keepers=keepers)
    kept = kept_partitions(events, snapshots, keepers) if keepers else {}
    return {
        name: SchemaGate(
            _strictest_policy(declared[name], own, name in kept), tuple(own), name in kept
        )
        for name, own in found.items()
        if name in declared
    }


def _strictest_policy(table: CdcTable, events: Iterable[SchemaEvent], has_kept_rows: bool) -> str:
    of_row = ASK if table.row_policy == STOP else FOLLOW
    wanted = (
        of_row if event.change is SchemaChange.ROW_PARKED else table.schema_policy
        for event in events
    )
    least = ASK if has_kept_rows else FOLLOW
    return max([least, *wanted], key=SCHEMA_POLICIES.index)


def gate_after(
    gates: Mapping[TableName, SchemaGate], name: TableName, watermark: Position | None
) -> SchemaGate | None:
    """Find the gate of a table with a watermark; None without an event that the table waits for."""
    gate = gates.get(name)
    return None if gate is None else gate.after(watermark)


def read_gate(
    zone: RawZone, table: CdcTable, scd: int, watermark: Position | None, through: Position
) -> SchemaGate | None:
    """Read the open events of one table for a fold that uses no snapshot above its end.

    Args:
        watermark: of the table; None before the first merge.
    """
    snapshots = [s for s in zone.snapshots.complete_snapshots() if s.position <= through]
    if table.needs_key(scd):
        snapshots = snapshots_with_key(table, snapshots, cache(zone.source_relations))
    return gate_after(
        find_gates([table], zone.schema_events.read(), snapshots), table.name, watermark
    )


def is_unforeseen(error: PgcdcError) -> bool:
    """Return whether a merge has found a schema change that the raw zone has no event of."""
    return isinstance(error, SchemaChangeError) and not isinstance(error, RecordedSchemaChange)


def record_unforeseen(
    zone: RawZone, name: TableName, error: SchemaChangeError, through: LsnWindow
) -> SchemaEvent | None:
    """Record the schema change that a merge found, and that no earlier event foresaw.

    The change came with a relation version that is in use since the newest snapshot before the end
    of the merge. The version may be older than the snapshot: the source has altered the table back.
    Of several versions it is the newest without an event: the merge that follows ends before this
    version, and finds an earlier one if it fails again. Each version leads to a few events at most.
    So a change that its snapshots do not heal is not recorded without end. An error about the table
    as a whole may know the LSN and the OID itself.

    A look at the catalog may have foreseen the change, but its LSN is above the first rows of the
    new version. If the re-snapshot has registered the version, the stream announces nothing new.

    Returns:
        The new event; None if there is no such version.
    """
    newest = _newest_snapshot(zone, name, through)
    if newest is not None and newest.epoch < through.epoch:
        # A table that left the publication is merged through the end of its last epoch.
        captured = zone.changes.captured_through(newest.epoch)
        if captured is None:
            return None
        through = LsnWindow(newest.epoch, Lsn(0), captured)
    is_new_table = error.column == ALL_COLUMNS
    change = SchemaChange(error.change or SchemaChange.TYPE_CHANGED)
    found: list[tuple[Lsn, int, str]] = []
    if error.lsn is not None and error.relation_id is not None:
        found.append((error.lsn, error.relation_id, error.reason))
    else:
        earlier = Counter(
            (event.relation_id, event.detail.partition(":")[0])
            for event in zone.schema_events.read()
            if event.found_by == MERGE and event.table == name and event.epoch == through.epoch
        )
        for version, lsn in _versions_in_use(zone, name, newest, through):
            relation_id, label = version.relation.relation_id, f"Relation version {version.version}"
            if earlier[relation_id, label] < _EVENTS_OF_VERSION:
                found.append((lsn, relation_id, f"{label}: {error.reason}"))
    for lsn, relation_id, reason in sorted(found, reverse=True):
        event = SchemaEvent(
            epoch=through.epoch,
            lsn=lsn,
            table=name,
            relation_id=relation_id,
            change=SchemaChange.TABLE_RECREATED if is_new_table else change,
            columns=() if is_new_table or not error.column else (error.column,),
            detail=f"{reason[0].upper()}{reason[1:]}.",
            needs_snapshot=True,
            found_by=MERGE,
        )
        if zone.schema_events.record([event]):
            return event
    return None


def _newest_snapshot(zone: RawZone, name: TableName, through: LsnWindow) -> Snapshot | None:
    """Return the newest snapshot of a table before the end of a merge."""
    return max(
        (
            snapshot
            for snapshot in zone.snapshots.complete_snapshots()
            if snapshot.name == name and snapshot.position <= through.end_position
        ),
        key=lambda snapshot: snapshot.position,
        default=None,
    )


def _versions_in_use(
    zone: RawZone, name: TableName, newest: Snapshot | None, through: LsnWindow
) -> list[tuple[RelationVersion, Lsn]]:
    """Return the versions of the changes since the newest snapshot, with their first commit LSN.

    The version of the snapshot itself is left out.
    """
    relations = zone.source_relations(through.epoch)
    ids = relations.relation_ids(name)
    copied = None if newest is None else relations.snapshot_version(newest)
    versions = {
        (version.relation.relation_id, version.version): version
        for version in zone.relations.versions(through.epoch)
        if (version.relation.relation_id in ids or version.relation.name == name)
        and version != copied
    }
    if not versions:
        return []
    first: dict[tuple[int, int], Lsn] = {}
    for batch in scan_changes(
        zone.changes.table,
        epoch=through.epoch,
        start=_start_in(through.epoch, newest),
        end=through.end,
        names={version.relation.name for version in versions.values()},
        columns=("relation_id", "relation_version", "commit_lsn"),
    ):
        groups = pa.Table.from_batches([batch]).group_by(["relation_id", "relation_version"])
        for row in groups.aggregate([("commit_lsn", "min")]).to_pylist():
            key, lsn = (row["relation_id"], row["relation_version"]), Lsn(row["commit_lsn_min"])
            first[key] = min(lsn, first.get(key, lsn))
    return [(version, first[key]) for key, version in versions.items() if key in first]


def _start_in(epoch: int, snapshot: Snapshot | None) -> Lsn:
    if snapshot is None or snapshot.epoch != epoch:
        return Lsn(0)
    return snapshot.snapshot_lsn


def schema_change_error(
    table: TableName, event: SchemaEvent, *, has_kept_rows: bool = False
) -> RecordedSchemaChange:
    """Return the error that names an event and its remedy."""
    kept = f". {KEPT_ROWS.rstrip('.')}" if has_kept_rows else ""
    return RecordedSchemaChange(
        relation=str(table),
        column=", ".join(event.columns) or ALL_COLUMNS,
        reason=f"{event.detail.rstrip('.')} ({event.change.value} at {event.lsn}){kept}",
    )


def describe_event(event: SchemaEvent) -> str:
    """Return a sentence about an event."""
    columns = f" ({', '.join(event.columns)})" if event.columns else ""
    return f"{event.change.value}{columns} at {event.lsn}: {event.detail.rstrip('.')}."
