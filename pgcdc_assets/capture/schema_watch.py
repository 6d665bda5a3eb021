"""Schema events: what the stream announces, and what a look at the catalog shows.

A look compares the definitions of the published tables with those of the look before, and records
an event per change. Each capture looks at the end of its window, each snapshot before it copies,
and the lag sensor in between. The order of the steps: read the look before, read the catalog, read
the LSN, record the events, store the look. The LSN of an event is therefore above the change. If
the process dies between two steps, the next look finds the same changes and skips the events that
are recorded. If another process has stored a look in between, the look is repeated.

The stream announces a change with the first row after the change. Its event is recorded before the
relation version: a version that is stored counts as known. A known version that is used again is a
change as well (see `announced_versions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.capture.announced_versions import (
    AnnouncedVersions,
    RelationChange,
    find_shown_later,
)
from pgcdc_assets.capture.sent_partitions import SentPartitions
from pgcdc_assets.capture.source_checks import check_server
from pgcdc_assets.capture.source_look import SourceLook, read_source
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings, sorted_failures
from pgcdc_assets.postgres.wal.positions import read_barrier, read_clock
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.table_definition import TableDefinition
from pgcdc_assets.raw.relations.definition_changes import compare_definitions, definition_to_keep
from pgcdc_assets.raw.relations.definitions import CatalogLook, SeenDefinition, definition_text
from pgcdc_assets.raw.relations.registry import RelationVersion, newest_ids_of
from pgcdc_assets.raw.relations.schema_changes import (
    SchemaChangeFound,
    compare_relations,
    one_value_detail,
)
from pgcdc_assets.raw.relations.schema_events import CATALOG, STREAM, SchemaChange, SchemaEvent
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

# A look is repeated if another process stores a look.
_ATTEMPTS = 5


def poll_catalog(
    conn: Connection, zone: RawZone, tables: Collection[TableName], publication: str
) -> list[SchemaEvent]:
    """Look at the catalog, and return the new events. Without a change, ask one query.

    A process that was killed after the commit of a snapshot has not completed the events of its
    table. This is done here too.

    Args:
        conn: a connection to the source database in autocommit mode.
        zone: the raw zone. Without an epoch there is nothing to compare with.
        tables: the declared tables.
        publication: the publication's name.

    Raises:
        RawZoneError: the connection is to another database than the raw zone was filled from.
        TransientError: the server or the lake is not available now.
    """
    epoch = zone.epochs.latest()
    if epoch is None:
        return []
    # Otherwise the tables of this database would count as dropped.
    check_server(conn, zone, epoch)
    found = SchemaWatch(zone, publication, epoch.epoch, tables).record(conn)
    return found + zone.complete_events(epoch.epoch, Lsn(0))


@dataclass
class SchemaWatch:
    """The schema events of one capture in one epoch.

    Attributes:
        zone: the raw zone.
        publication: the publication's name.
        epoch: the epoch.
        tables: the declared tables, if known.
        settings: the source database of a capture; None: a failed look is an error.
        warnings: descriptions of looks that failed.
    """

    zone: RawZone
    publication: str
    epoch: int
    tables: Collection[TableName] = ()
    settings: ConnectionSettings | None = None
    warnings: list[str] = field(default_factory=list)
    _announced: AnnouncedVersions = field(default_factory=AnnouncedVersions, repr=False)
    _partitions: SentPartitions = field(default_factory=SentPartitions, repr=False)

    def register(self, relation: Relation, commit_lsn: Lsn, doubt: str, is_for_row: bool) -> int:
        """Register an announced relation, note a new version, and return the version's number.

        Args:
            doubt: why other columns of the table may be meant; the table then needs a snapshot.
            is_for_row: see `SentPartitions.note`.
        """
        self._partitions.note(relation, commit_lsn, is_for_row)
        relations = self.zone.relations
        oid = relation.relation_id
        is_known = any(v.describes(relation) for _, v in relations.registered(self.epoch, oid))
        before = relation if is_known else relations.version_before(self.epoch, oid, commit_lsn)
        self._announced.note(RelationChange(relation, before, commit_lsn, doubt))
        return relations.register(self.epoch, relation, commit_lsn)

    def record(self, conn: Connection | None) -> list[SchemaEvent]:
        """Record the events of the announced versions and of a look, and return the new events.

        Args:
            conn: a connection in autocommit mode; None: no look.

        Raises:
            TransientError: the lake is not available now.
        """
        new: list[SchemaEvent] = []
        for _ in range(_ATTEMPTS):
            base = self.zone.definitions.read(self.epoch)
            # A process may have read the epoch before a renewal.
            look = None if conn is None or base.is_past else self._look(conn, base)
            is_unchanged = look is None or look.is_unchanged
            announced = self._announced.changes(base)
            if is_unchanged and not announced and not self._partitions.sent:
                return new
            events = _Events(self, base, look)
            found = events.find(announced) + events.of_partitions(self._partitions)
            new += self.zone.record_events(self.epoch, found)
            failpoints.reach(failpoints.AFTER_SCHEMA_EVENTS)
            if look is None or look.is_unchanged:
                return new
            if self.zone.definitions.replace(self.epoch, base, look.digest, events.seen()):
                return new
        return new

    def _look(self, conn: Connection, base: CatalogLook) -> SourceLook | None:
        """Return the catalog's definitions; None if the look failed beside a capture.

        A capture that cannot look lands its rows nevertheless. The lag sensor looks as well.
        """
        if self.settings is None:
            return read_source(conn, self.publication, base)
        try:
            with sorted_failures(self.settings, "lease"):
                look = read_source(conn, self.publication, base)
                if look.is_unchanged and self._partitions.sent:
                    return replace(look, lsn=read_barrier(conn), at=read_clock(conn))
                return look
        except TransientError as error:
            self.warnings.append(f"the catalog was not compared: {error}")
            return None


class _Events:
    """The events of the differences between a look and the look before, and of the stream."""

    def __init__(self, watch: SchemaWatch, base: CatalogLook, look: SourceLook | None) -> None:
        self._watch = watch
        self._base = base
        self._is_complete = look is not None
        self._look = None if look is None or look.is_unchanged else look
        self._last = look
        self._recorded = [e for e in watch.zone.schema_events.read() if e.epoch == watch.epoch]
        self._declared = self._find_declared()

    def find(self, announced: Iterable[RelationChange]) -> list[SchemaEvent]:
        """Return the events that are not recorded yet."""
        found = [event for one in announced for event in self._of_announcement(one)]
        self._recorded += found
        return found + (self._of_look(self._look) if self._look is not None else [])

    def of_partitions(self, partitions: SentPartitions) -> list[SchemaEvent]:
        """Return the events of partitions that sent rows, and that neither look has.

        Such a partition was attached and detached between the looks. Its rows are in the stream
        under the name of its root, and no longer in the root. Without a look, a partition that the
        look before does not have may be gone as well.
        """
        before = {oid: seen.definition for oid, seen in self._base.tables.items()}
        now = {**before, **(self._look.tables if self._look is not None else {})}
        found = []
        for root, gone in partitions.without(before, now, self._recorded).items():
            change = SchemaChangeFound(SchemaChange.PARTITION_DETACHED, (), gone.detail, True)
            table = self._declared.get(root, now[root].relation.name)
            if self._last is None:
                found.append(self._event(gone.lsn, table, root, change, STREAM))
            else:
                event = self._event(self._last.lsn, table, root, change, CATALOG)
                found.append(replace(event, seen_at=self._last.at))
        return found

    def seen(self) -> dict[int, SeenDefinition]:
        """Return the definitions to store."""
        seen = {}
        look = self._look
        assert look is not None
        for oid, after in look.tables.items():
            before = self._base.tables.get(oid)
            kept = after if before is None else definition_to_keep(before.definition, after)
            text = definition_text(kept)
            lsn = before.lsn if before is not None and before.text == text else look.lsn
            seen[oid] = SeenDefinition(self._declared[oid], lsn, text)
        return seen

    def _find_declared(self) -> dict[int, TableName]:
        """Return the declared table of each OID that one of the two looks has, or an earlier look.

        A table keeps the name under which it was first seen, until another table has this name or
        a table of its new name is declared. A dropped table keeps the name of its last event,
        because its changes may still be in the backlog.
        """
        current = {oid: seen.definition.relation.name for oid, seen in self._base.tables.items()}
        first = {oid: seen.table for oid, seen in self._base.tables.items()}
        now = {} if self._look is None else self._look.tables
        current |= {oid: table.relation.name for oid, table in now.items()}
        if new := now.keys() - first.keys():
            for version in reversed(self._known_versions):
                if version.relation.relation_id not in self._base.tables:
                    first[version.relation.relation_id] = version.relation.name
            # The table may have been renamed in an earlier epoch.
            followed = self._watch.zone.followed_ids()
            first |= {oid: name for name, oid in followed.items() if oid in new}
        taken = {name: oid for oid, name in current.items() if self._is_there(oid)}
        declared = {
            event.relation_id: event.table
            for event in sorted(self._recorded, key=lambda event: event.position)
            # The event of a name that another table had has this name, for any OID.
            if event.change is not SchemaChange.TABLE_RECREATED
        }
        for oid, name in current.items():
            known = first.get(oid, name)
            is_taken = taken.get(known, oid) != oid
            declared[oid] = name if name in self._watch.tables or is_taken else known
        return declared

    def _is_there(self, oid: int) -> bool:
        return self._look is None or oid in self._look.tables

    def _of_announcement(self, one: RelationChange) -> Iterator[SchemaEvent]:
        oid, relation = one.relation.relation_id, one.relation
        names = {*self._declared.values(), *self._watch.tables}
        if self._is_complete and oid not in self._declared and relation.name not in names:
            # A partition that is published under the name of its root.
            return
        before = self._base.tables.get(oid)
        now = self._look.tables.get(oid) if self._look is not None else None
        table = self._declared.get(oid, (one.before or relation).name)
        # The look before may have seen the version already, and recorded its changes.
        was_seen = before is not None and before.definition.relation.describes(relation)
        recorded = [e for e in self._recorded if e.relation_id == oid] if was_seen else []
        changes = self._compare(one, before, now)
        if one.is_known:
            changes = find_shown_later(recorded, one.lsn)
        for change in changes:
            if not any(_covers(event, change, one.lsn) for event in recorded):
                yield self._event(one.lsn, table, oid, change, STREAM)
        if one.doubt:
            doubt = SchemaChangeFound(SchemaChange.COLUMNS_UNCERTAIN, (), one.doubt, True)
            yield self._event(one.lsn, table, oid, doubt, STREAM)
        if one.before is None or one.before.name != relation.name:
            yield from self._recreated(one.lsn, relation, STREAM)

    def _compare(
        self, one: RelationChange, before: SeenDefinition | None, now: TableDefinition | None
    ) -> list[SchemaChangeFound]:
        if one.before is None:
            return []
        is_rewritten = None
        if before is not None and now is not None:
            added = {c.attnum for c in one.relation.columns} - {
                c.attnum for c in one.before.columns
            }
            if not added & before.definition.attnums:
                # The columns were added between the two looks.
                is_rewritten = now.is_rewritten_since(before.definition)
        return compare_relations(one.before, one.relation, is_rewritten)

    def _of_look(self, look: SourceLook) -> list[SchemaEvent]:
        found: list[SchemaEvent] = []
        for oid, before in self._base.tables.items():
            after = look.tables.get(oid)
            for change in _changes(before.definition, after, look.unused):
                if not self._is_recorded(oid, before.lsn, change):
                    found.append(self._event(look.lsn, self._declared[oid], oid, change, CATALOG))
        for oid, after in look.tables.items():
            known = self._base.tables.get(oid)
            is_renamed = known is None or known.definition.relation.name != after.relation.name
            if after.is_published and is_renamed:
                found += self._recreated(look.lsn, after.relation, CATALOG)
        return found

    def _is_recorded(self, oid: int, since: Lsn, change: SchemaChangeFound) -> bool:
        """Return whether an event that covers the change was recorded after the look before.

        A commit record may begin at the LSN of that look.
        """
        return any(
            event.relation_id == oid
            and (event.lsn > since or (event.lsn == since and event.found_by == STREAM))
            and (event.needs_snapshot or not change.needs_snapshot)
            and (event.change, event.columns, event.detail)
            == (change.change, change.columns, change.detail)
            for event in self._recorded
        )

    def _recreated(self, lsn: Lsn, relation: Relation, found_by: str) -> Iterator[SchemaEvent]:
        """Yield the event of a table whose name belonged to another OID.

        Names may be exchanged and given back: the relation versions are those from before, so the
        look before and the newest event of the name come first.
        """
        name, oid = relation.name, relation.relation_id
        others = {o: seen for o, seen in self._base.tables.items() if o != oid}
        had_name = any(seen.definition.relation.name == name for seen in others.values())
        owner = newest_ids_of(self._known_versions, [name]).get(name)
        if owner is None:
            owner = next((o for o, seen in others.items() if seen.table == name), None)
        if not had_name and owner in (None, oid):
            return
        earlier = [
            event
            for event in self._recorded
            if event.table == name and event.change is SchemaChange.TABLE_RECREATED
        ]
        newest = max(earlier, key=lambda event: event.position, default=None)
        if newest is not None and newest.relation_id == oid:
            return
        detail = f"Another table has the name {relation.qualified_name} now."
        change = SchemaChangeFound(SchemaChange.TABLE_RECREATED, (), detail, True)
        yield self._event(lsn, name, oid, change, found_by)

    @cached_property
    def _known_versions(self) -> list[RelationVersion]:
        """The stored relation versions, without those of the window."""
        return self._watch.zone.relations.versions(self._watch.epoch)

    def _event(
        self, lsn: Lsn, table: TableName, oid: int, change: SchemaChangeFound, found_by: str
    ) -> SchemaEvent:
        return SchemaEvent(
            self._watch.epoch,
            lsn,
            table,
            oid,
            change.change,
            change.columns,
            change.detail,
            change.needs_snapshot,
            found_by,
            self._look.at if found_by == CATALOG and self._look is not None else None,
        )


def _covers(event: SchemaEvent, change: SchemaChangeFound, lsn: Lsn) -> bool:
    """Return whether a recorded event suffices for a change that the stream announces at an LSN.

    A look records a change above its first rows. With `on_schema_change: stop`, a table stops
    before these rows. The value of the rows that are older than a column is lost if the table was
    rewritten after the look, and the column has another type.
    """
    if (event.change, event.columns) != (change.change, change.columns):
        return False
    is_added = change.change is SchemaChange.COLUMN_ADDED
    if is_added and change.needs_snapshot and event.detail == one_value_detail(*change.columns):
        return False
    is_stop = not event.needs_snapshot and event.change is not SchemaChange.VALUES_UNCERTAIN
    return event.lsn <= lsn or not is_stop


def _changes(
    before: TableDefinition, after: TableDefinition | None, unused: Collection[int]
) -> list[SchemaChangeFound]:
    if after is not None:
        return compare_definitions(before, after, unused)
    if not before.is_published:
        return []
    return [SchemaChangeFound(SchemaChange.TABLE_DROPPED, (), "The table was dropped.", False)]
