"""The relation behind a declared table: identified by its OID, under every name that it had.

`ALTER TABLE ... RENAME` and `SET SCHEMA` keep a table's OID. The newest snapshot of a declared
table in an epoch therefore determines the OID. Later changes of this OID belong to the declared
table, whatever schema and name they have. In this example the declared table is `public.orders`,
which was renamed to `sales.orders` and then to `sales.invoices`:

    raw/snapshots    public.orders                                     the declared name, always
    raw/relations    public.orders, sales.orders, sales.invoices       the name at the source
    raw/changes      the same three                                    the name at the source
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.relations.schema_events import SchemaChange, SchemaEvent
from pgcdc_assets.raw.snapshots import Snapshot, SnapshotIdentity
from pgcdc_assets.table_name import TableName


def find_snapshot_version(
    snapshot: Snapshot, versions: Iterable[RelationVersion]
) -> RelationVersion | None:
    """Find the relation version that describes a snapshot's tuples.

    Early releases did not record the OID of a snapshot. The version is then searched by its name.

    Args:
        versions: the relation versions of the snapshot's epoch.
    """
    found = [v for v in versions if v.version == snapshot.relation_version]
    if snapshot.relation_id is not None:
        return next((v for v in found if v.relation.relation_id == snapshot.relation_id), None)
    candidates = [v for v in found if v.relation.name == snapshot.name]
    # A table that was dropped and created again counts its versions from 1 again.
    seen = [v for v in candidates if v.lsn <= snapshot.snapshot_lsn] or candidates
    return max(seen, key=lambda v: v.lsn, default=None)


class SourceRelations:
    """The relations behind the declared tables of one epoch.

    Args:
        snapshots: complete snapshots; those of other epochs are ignored.
        versions: the relation versions of the epoch.
    """

    def __init__(
        self, epoch: int, snapshots: Iterable[Snapshot], versions: Sequence[RelationVersion]
    ) -> None:
        self._epoch = epoch
        self._by_id: dict[int, list[RelationVersion]] = {}
        self._by_name: dict[TableName, list[RelationVersion]] = {}
        self._snapshots: dict[TableName, list[tuple[Lsn, RelationVersion]]] = {}
        self._described: dict[SnapshotIdentity, RelationVersion] = {}
        for version in versions:
            self._by_id.setdefault(version.relation.relation_id, []).append(version)
            self._by_name.setdefault(version.relation.name, []).append(version)
        for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.position):
            if snapshot.epoch != epoch:
                continue
            candidates = self._by_name.get(snapshot.name, [])
            if snapshot.relation_id is not None:
                candidates = self._by_id.get(snapshot.relation_id, [])
            described = find_snapshot_version(snapshot, candidates)
            if described is not None:
                self._described[snapshot.identity] = described
                taken = self._snapshots.setdefault(snapshot.name, [])
                taken.append((snapshot.snapshot_lsn, described))

    @property
    def tables(self) -> tuple[TableName, ...]:
        """The declared tables with a snapshot."""
        return tuple(self._snapshots)

    def snapshot_version(self, snapshot: Snapshot) -> RelationVersion | None:
        """Return the version that describes a snapshot's tuples; None if it is missing."""
        return self._described.get(snapshot.identity)

    def versions(self, relation_id: int) -> tuple[RelationVersion, ...]:
        """Return the versions of a relation in order."""
        return tuple(sorted(self._by_id.get(relation_id, []), key=lambda v: v.version))

    def newest_relation(self, table: TableName) -> Relation | None:
        """Return the relation in a table's newest snapshot; None without a snapshot."""
        taken = self._snapshots.get(table)
        return taken[-1][1].relation if taken else None

    def newest_id(self, table: TableName) -> int | None:
        """Return the OID of a table's newest snapshot; None without a snapshot."""
        relation = self.newest_relation(table)
        return None if relation is None else relation.relation_id

    def newest_ids(self, tables: Iterable[TableName]) -> dict[TableName, int]:
        """Return the OID of each table's newest snapshot; tables without one are left out."""
        found = {table: self.newest_id(table) for table in tables}
        return {table: oid for table, oid in found.items() if oid is not None}

    def followed_ids(
        self, tables: Iterable[TableName], events: Iterable[SchemaEvent]
    ) -> dict[TableName, int]:
        """Return the OIDs that the next snapshots copy; tables never seen are left out.

        The OID is that of the newest snapshot. If another table had the declared name later, its
        OID is followed, also after a further rename.

        Args:
            events: schema events; those of other epochs are ignored.
        """
        found = self.newest_ids(tables)
        of_epoch = (event for event in events if event.epoch == self._epoch)
        for event in sorted(of_epoch, key=lambda event: event.lsn):
            taken = self._snapshots.get(event.table)
            is_later = taken is not None and event.lsn > taken[-1][0]
            if event.change is SchemaChange.TABLE_RECREATED and event.table in found and is_later:
                found[event.table] = event.relation_id
        return found

    def of_each_table(self, events: Iterable[SchemaEvent]) -> list[SchemaEvent]:
        """Return events, and a copy for each further declared table that follows the relation.

        The stream knows a relation by its name at the source, and a look by the name under which
        the epoch has first seen it. A table may have been declared under another name before or
        since. The event that another table has a name is of this name alone.

        Args:
            events: events of the epoch.
        """
        followed: dict[int | None, list[TableName]] = {}
        for table in self._snapshots:
            followed.setdefault(self.newest_id(table), []).append(table)
        found = []
        for event in events:
            found.append(event)
            if event.change is not SchemaChange.TABLE_RECREATED:
                others = (t for t in followed.get(event.relation_id, ()) if t != event.table)
                found += [replace(event, table=table) for table in others]
        return found

    def later_events(self, events: Iterable[SchemaEvent]) -> list[SchemaEvent]:
        """Return the events of `of_each_table` since the newest snapshot of their table."""
        return [
            event
            for event in self.of_each_table(events)
            if event.table in self._snapshots and event.lsn >= self._snapshots[event.table][-1][0]
        ]

    def relation_ids(self, table: TableName) -> frozenset[int]:
        """Return the OIDs of all snapshots of a table."""
        taken = self._snapshots.get(table, [])
        return frozenset(described.relation.relation_id for _, described in taken)

    def names(self, table: TableName, relation_ids: Collection[int] = ()) -> frozenset[TableName]:
        """Return all names under which changes of a table may be in the epoch's windows.

        The names are too many rather than too few: another relation may have had one of the names
        at another time. Names select windows, files and row groups; the OID selects the changes.

        Args:
            table: the declared name.
            relation_ids: further OIDs of the table.
        """
        ids = {*relation_ids, *self.relation_ids(table)}
        found = (version.relation.name for oid in ids for version in self._by_id.get(oid, []))
        return frozenset({table, *found})

    def snapshot_name(self, table: TableName, relation_id: int, through: Lsn) -> TableName | None:
        """Return the name of a relation at the source in the table's newest snapshot up to an LSN.

        Without such a snapshot it is None.
        """
        names = [
            described.relation.name
            for lsn, described in self._snapshots.get(table, [])
            if lsn <= through and described.relation.relation_id == relation_id
        ]
        return names[-1] if names else None

    def snapshot_lsn(self, table: TableName, relation_id: int, before: Lsn) -> Lsn | None:
        """Return the LSN of a table's newest snapshot of a relation below an LSN.

        Without such a snapshot it is None.
        """
        lsns = [
            lsn
            for lsn, described in self._snapshots.get(table, [])
            if lsn < before and described.relation.relation_id == relation_id
        ]
        return max(lsns, default=None)

    def was_of_another(self, name: TableName, relation_id: int, lsn: Lsn) -> bool:
        """Return whether another relation was seen with a name up to an LSN."""
        return any(
            version.relation.relation_id != relation_id and version.lsn <= lsn
            for version in self._by_name.get(name, [])
        )
