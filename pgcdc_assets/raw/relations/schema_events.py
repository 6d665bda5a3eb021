"""`raw/schema_events`: the changes of the tables' definitions, each as of an LSN.

The capture records the changes that the stream announces, and the lag sensor those that only the
catalog shows. An event whose change the stream cannot replay is open until a complete snapshot of
its table has the change. The state follows from the lake alone.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from deltalake import DeltaTable

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.delta.scan import data_files, scan
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.table_name import TableName

# Each refused commit means that another process committed events.
_ATTEMPTS = 20

STREAM = "stream"
CATALOG = "catalog"
MERGE = "merge"

EventIdentity = tuple[int, int, TableName, str, tuple[str, ...], Lsn]


class SchemaChange(enum.StrEnum):
    """A change of a table's definition."""

    COLUMN_ADDED = "column_added"
    COLUMN_DROPPED = "column_dropped"
    COLUMN_RENAMED = "column_renamed"
    COLUMNS_UNCERTAIN = "columns_uncertain"
    TYPE_WIDENED = "type_widened"
    TYPE_CHANGED = "type_changed"
    KEY_CHANGED = "key_changed"
    IDENTITY_CHANGED = "identity_changed"
    TABLE_RENAMED = "table_renamed"
    TABLE_DROPPED = "table_dropped"
    TABLE_RECREATED = "table_recreated"
    TABLE_REWRITTEN = "table_rewritten"
    VALUES_UNCERTAIN = "values_uncertain"
    VALUES_CONFIRMED = "values_confirmed"
    PARTITION_ATTACHED = "partition_attached"
    PARTITION_DETACHED = "partition_detached"
    PARTITION_TRUNCATED = "partition_truncated"
    PUBLICATION_CHANGED = "publication_changed"
    ROW_PARKED = "row_parked"


# The rows of a partition left the source without a message of the stream.
_DETACHMENTS = (SchemaChange.PARTITION_DETACHED, SchemaChange.PARTITION_TRUNCATED)


@dataclass(frozen=True)
class SchemaEvent:
    """A change of a table's definition.

    Attributes:
        epoch: the epoch.
        lsn: of an event of the stream or of a merge, the commit LSN of the transaction that
            announced the new relation version; of an event of the catalog, the LSN of the WAL's end
            after the query.
        table: the declared table.
        relation_id: OID of the table.
        change: what changed.
        columns: names of the columns concerned.
        detail: one sentence without a row value.
        needs_snapshot: the stream cannot replay the change.
        found_by: `stream`, `catalog`, or `merge` for a change that the capture did not foresee.
        seen_at: of an event of the catalog, the time of the look by the source's clock; None in a
            lake of an early release.
        recorded_at: time of the record by the clock of the recording machine, set by `record`. The
            time orders nothing.
    """

    epoch: int
    lsn: Lsn
    table: TableName
    relation_id: int
    change: SchemaChange
    columns: tuple[str, ...]
    detail: str
    needs_snapshot: bool
    found_by: str
    seen_at: dt.datetime | None = field(default=None, compare=False)
    recorded_at: dt.datetime | None = field(default=None, compare=False)

    @property
    def position(self) -> Position:
        """Epoch and LSN."""
        return Position(self.epoch, self.lsn)

    @property
    def identity(self) -> EventIdentity:
        """The facts by which `record` recognises an event."""
        columns = tuple(self.columns)
        return self.epoch, self.relation_id, self.table, self.change.value, columns, self.lsn

    def is_healed_by(self, snapshot: Snapshot) -> bool:
        """Return whether a complete snapshot of the table has the change.

        A snapshot has the transactions with commit_lsn < snapshot_lsn. The transaction of an event
        of the stream may itself have changed the rows.
        """
        if snapshot.name != self.table:
            return False
        if self.found_by == CATALOG:
            return snapshot.position >= self.position
        return snapshot.position > self.position


@dataclass(frozen=True)
class SchemaEventLog:
    """The schema events of one capture.

    Attributes:
        table: the Delta table.
        capture: the capture's name.
    """

    table: RawTable
    capture: str

    def read(self) -> list[SchemaEvent]:
        """Return all events in stream order; no event for a lake of an earlier release."""
        loaded = self.table.newest()
        return [] if loaded is None else self._read(loaded)

    def record(self, events: Iterable[SchemaEvent]) -> list[SchemaEvent]:
        """Store the events that are not stored yet in one commit, and return these events.

        Raises:
            TransientError: the lake cannot be written, or other processes recorded events at each
                attempt.
        """
        wanted = {event.identity: event for event in events}
        for _ in range(_ATTEMPTS):
            if not wanted:
                return []
            loaded = self.table.load_or_create()
            stored = self._read(loaded)
            known = {event.identity for event in stored}
            now = dt.datetime.now(dt.UTC)
            new = [
                replace(event, recorded_at=event.recorded_at or now)
                for identity, event in wanted.items()
                if identity not in known
            ]
            if not new:
                return []
            if self.table.commit_rows(
                loaded,
                [_row(event) for event in new],
                app_id=f"pgcdc:{self.capture}:schema_events",
                app_version=len(stored) + len(new),
                record={"schema_events": len(new)},
            ):
                return new
        raise TransientError(
            reason=f"Other processes recorded schema events in {self.table.uri} at each attempt. "
            "Nothing of this attempt was committed; run it again."
        )

    def _read(self, loaded: DeltaTable) -> list[SchemaEvent]:
        events = [
            _event(row)
            for batch in scan(self.table, data_files(loaded), self.table.schema.names)
            for row in batch.to_pylist()
        ]
        return sorted(events, key=lambda event: (event.position, event.identity))


def open_events(
    events: Iterable[SchemaEvent],
    snapshots: Iterable[Snapshot],
    *,
    replayable_of: Collection[TableName] = (),
    keepers: Collection[TableName] = (),
) -> dict[TableName, list[SchemaEvent]]:
    """Return the events of each table that need a snapshot and have none yet, oldest first.

    Args:
        replayable_of: tables whose replayable events count too.
        keepers: tables that keep the rows of detached partitions, whose events do not count.
    """
    counted = (
        event
        for event in events
        if event.needs_snapshot
        or (event.table in replayable_of and event.change is not SchemaChange.VALUES_CONFIRMED)
    )
    return _without_snapshot(
        (event for event in counted if event.table not in keepers or not _is_detachment(event)),
        snapshots,
    )


def kept_partitions(
    events: Iterable[SchemaEvent], snapshots: Iterable[Snapshot], keepers: Collection[TableName]
) -> dict[TableName, list[SchemaEvent]]:
    """Return the events of the partitions whose rows the tables have kept, oldest first.

    A complete snapshot has no such row.

    Args:
        keepers: tables that keep the rows of detached partitions.
    """
    own = (event for event in events if event.table in keepers and _is_detachment(event))
    return _without_snapshot(own, snapshots)


def _is_detachment(event: SchemaEvent) -> bool:
    return event.needs_snapshot and event.change in _DETACHMENTS


def _without_snapshot(
    events: Iterable[SchemaEvent], snapshots: Iterable[Snapshot]
) -> dict[TableName, list[SchemaEvent]]:
    """Return the events that no complete snapshot has healed, by table, oldest first."""
    newest: dict[TableName, Snapshot] = {}
    for snapshot in snapshots:
        known = newest.get(snapshot.name)
        if known is None or snapshot.position > known.position:
            newest[snapshot.name] = snapshot
    found: dict[TableName, list[SchemaEvent]] = {}
    for event in sorted(events, key=lambda event: event.position):
        copied = newest.get(event.table)
        if copied is None or not event.is_healed_by(copied):
            found.setdefault(event.table, []).append(event)
    return found


def _row(event: SchemaEvent) -> dict[str, Any]:
    return {
        "epoch": event.epoch,
        "lsn": int(event.lsn),
        "schema": event.table.schema,
        "table": event.table.table,
        "relation_id": event.relation_id,
        "change": event.change.value,
        "columns": list(event.columns),
        "detail": event.detail,
        "needs_snapshot": event.needs_snapshot,
        "found_by": event.found_by,
        "recorded_at": event.recorded_at,
        "seen_at": event.seen_at,
    }


def _event(row: dict[str, Any]) -> SchemaEvent:
    return SchemaEvent(
        epoch=row["epoch"],
        lsn=Lsn(row["lsn"]),
        table=TableName(row["schema"], row["table"]),
        relation_id=row["relation_id"],
        change=SchemaChange(row["change"]),
        columns=tuple(row["columns"]),
        detail=row["detail"],
        needs_snapshot=row["needs_snapshot"],
        found_by=row["found_by"],
        recorded_at=row["recorded_at"],
        seen_at=row["seen_at"],
    )
