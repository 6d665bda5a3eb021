"""The raw zone of one capture: its tables under `<lake>/<name>/raw`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa

from pgcdc_assets.errors import RawZoneError, renewal_command
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw import changes, prepared_transactions, ranges, schema, snapshots
from pgcdc_assets.raw.app_ids import relations_app_id, timeline_start_app_id
from pgcdc_assets.raw.changes import ChangeLog
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.raw.epochs import Epoch, EpochLog
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.prepared_transactions import PreparedStore
from pgcdc_assets.raw.ranges import RangeStore
from pgcdc_assets.raw.relations.definitions import DefinitionStore
from pgcdc_assets.raw.relations.registry import RelationRegistry
from pgcdc_assets.raw.relations.schema_events import (
    MERGE,
    SchemaChange,
    SchemaEvent,
    SchemaEventLog,
)
from pgcdc_assets.raw.relations.source_relations import SourceRelations
from pgcdc_assets.raw.snapshots import SnapshotStore
from pgcdc_assets.raw.table_list import TableListStore
from pgcdc_assets.raw.windows import index as window_index
from pgcdc_assets.raw.windows.index import WindowIndex
from pgcdc_assets.table_name import TableName


@dataclass(frozen=True)
class RawZone:
    """The tables of one capture's raw zone, opened or created at their first use.

    Attributes:
        lake: the lake.
        name: the capture's name.
    """

    lake: Lake
    name: str

    @property
    def uri(self) -> str:
        """Path or URI of the folder of the tables."""
        return self.lake.path(self.name, "raw")

    def captured_on(self, epoch: Epoch) -> tuple[Lsn, int | None]:
        """Return the end of an epoch's newest window, and the window's timeline.

        The timeline is None for a window of an early release, which did not record the timeline.
        """
        end, timeline = self.changes.captured_on(epoch.epoch)
        return (epoch.start_lsn, epoch.timeline) if end is None else (end, timeline)

    def timeline_start(self, epoch: Epoch) -> Lsn | None:
        """Return the LSN at which the timeline of an epoch's newest window began.

        The LSN is None for the first timeline, and for a window that did not record it.
        """
        timeline, table = self.changes.captured_on(epoch.epoch)[1], self.changes.table.newest()
        if timeline is None or table is None:
            return None
        began = table.transaction_version(timeline_start_app_id(self.name, epoch.epoch, timeline))
        return None if began is None else Lsn(began)

    def check_relations(self, epoch: Epoch) -> None:
        """Check that `raw/relations` has all relation versions of the landed windows.

        Otherwise the numbers of the missing versions would be used again, for other columns.

        Raises:
            RawZoneError: it has fewer, because it was restored from an earlier time.
        """
        table = self.changes.table.newest()
        name = relations_app_id(self.name, epoch.epoch)
        used = None if table is None else table.transaction_version(name)
        if used is None:
            return
        count = len(self.relations.versions(epoch.epoch))
        if count < used:
            raise RawZoneError(
                raw_zone=self.relations.table.uri,
                reason=f"epoch {epoch.epoch} has {count} relation versions, but the landed windows "
                f"have used {used} of them, so the table is from an earlier time than raw/changes. "
                "Restore both from one time, or begin a new epoch with "
                f"{renewal_command(self.name)}.",
            )

    def used_timelines(self, epoch: Epoch) -> list[tuple[Lsn, int | None]]:
        """Return the ends of the WAL that an epoch has used, each with its timeline.

        A snapshot may be newer than the newest window.
        """
        snapshots = [
            (lsn, timeline)
            for store in (self.snapshots, self.partial_snapshots)
            for timeline, lsn in store.timelines(epoch.epoch).items()
        ]
        return [self.captured_on(epoch), *snapshots]

    def source_relations(self, epoch: int, through: Lsn | None = None) -> SourceRelations:
        """Read which relations are behind the declared tables of an epoch.

        Args:
            through: use no later snapshots; None: all snapshots.
        """
        snapshots = [
            snapshot
            for snapshot in self.snapshots.complete_snapshots(epoch)
            if through is None or snapshot.snapshot_lsn <= through
        ]
        return SourceRelations(epoch, snapshots, self.relations.versions(epoch))

    def record_events(self, epoch: int, events: Sequence[SchemaEvent]) -> list[SchemaEvent]:
        """Store events of an epoch, for each declared table that follows their relation.

        Returns:
            the events that were not stored before.

        Raises:
            TransientError: the lake cannot be written, or other processes recorded events at each
                attempt.
        """
        if not events:
            return []
        return self.schema_events.record(self.source_relations(epoch).of_each_table(events))

    def complete_events(self, epoch: int, since: Lsn) -> list[SchemaEvent]:
        """Store the events since a table's newest snapshot that only another table of its OID has.

        Until the commit of the first snapshot under a new name, nothing shows that the table
        follows the relation, so the events of this time have the earlier name.

        Args:
            epoch: the epoch.
            since: the lowest LSN of the events.

        Returns:
            the events that were not stored before.

        Raises:
            TransientError: the lake cannot be written, or other processes recorded events at each
                attempt.
        """
        events = [
            event
            for event in self.schema_events.read()
            if event.epoch == epoch
            and event.lsn >= since
            and event.found_by != MERGE
            and event.change is not SchemaChange.VALUES_CONFIRMED
        ]
        if not events:
            return []
        return self.schema_events.record(self.source_relations(epoch).later_events(events))

    def followed_ids(self) -> dict[TableName, int]:
        """Return the OID of each declared table with a snapshot, by the declared name.

        A new epoch has no snapshots yet. An earlier epoch of the same cluster has the same OIDs,
        through the WAL that the server still has: a restored server may give the OIDs of later
        tables to other tables.
        """
        epochs = self.epochs.all()
        events = self.schema_events.read()
        known: dict[TableName, int] = {}
        through: Lsn | None = None
        for epoch in reversed(epochs):
            if epoch.system_identifier != epochs[-1].system_identifier:
                continue
            relations = self.source_relations(epoch.epoch, through)
            shared = [event for event in events if through is None or event.lsn <= through]
            known = relations.followed_ids(relations.tables, shared) | known
            limits = (through, epoch.shared_through)
            through = min((limit for limit in limits if limit is not None), default=None)
        return known

    def app_id(self, epoch: int) -> str:
        """Return the application id of all Delta transactions of an epoch."""
        return self.changes.app_id(epoch)

    @cached_property
    def changes(self) -> ChangeLog:
        """Every captured change."""
        table = replace(
            self._table("changes", schema.CHANGES, (), changes.STATISTICS),
            file_retention=changes.FILE_RETENTION,
        )
        windows = self._table("windows", schema.WINDOWS, (), window_index.STATISTICS)
        index = WindowIndex(windows, table, f"pgcdc:{self.name}:windows", self._epoch_starts)
        return ChangeLog(table, index, self.name)

    def _epoch_starts(self) -> dict[int, int]:
        return {epoch.epoch: int(epoch.start_lsn) for epoch in self.epochs.all()}

    @cached_property
    def relations(self) -> RelationRegistry:
        """The relation versions that describe the tuples."""
        return RelationRegistry(self._table("relations", schema.RELATIONS), self.name)

    @cached_property
    def snapshots(self) -> SnapshotStore:
        """The snapshots of tables."""
        table = self._table(
            "snapshots", schema.SNAPSHOTS, snapshots.PARTITION_BY, snapshots.STATISTICS
        )
        return SnapshotStore(table, self.name)

    @cached_property
    def partial_snapshots(self) -> SnapshotStore:
        """The snapshots of some rows of a table, each of which replaces the rows of its keys.

        They are not among `snapshots`: no table can be made of one.
        """
        table = self._table(
            "partial_snapshots", schema.SNAPSHOTS, snapshots.PARTITION_BY, snapshots.STATISTICS
        )
        return SnapshotStore(table, self.name)

    @cached_property
    def ranges(self) -> RangeStore:
        """The ranges of snapshots that are not complete."""
        return RangeStore(self._table("ranges", schema.RANGES, ranges.PARTITION_BY), self.name)

    @cached_property
    def prepared(self) -> PreparedStore:
        """The prepared transactions that have not ended."""
        table = self._table("prepared", schema.PREPARED, (), prepared_transactions.STATISTICS)
        return PreparedStore(table, self.name)

    @cached_property
    def epochs(self) -> EpochLog:
        """The incarnations of the slot."""
        return EpochLog(self._table("epochs", schema.EPOCHS), self.name)

    @cached_property
    def schema_events(self) -> SchemaEventLog:
        """The changes of the tables' definitions."""
        return SchemaEventLog(self._table("schema_events", schema.SCHEMA_EVENTS), self.name)

    @cached_property
    def definitions(self) -> DefinitionStore:
        """The definitions of the tables at the newest look at the catalog."""
        return DefinitionStore(self._table("definitions", schema.DEFINITIONS), self.name)

    @cached_property
    def table_list(self) -> TableListStore:
        """The tables of a publication that the capture follows."""
        return TableListStore(self._table("table_list", schema.TABLE_LIST), self.name)

    def _table(
        self,
        kind: str,
        table_schema: pa.Schema,
        partition_by: tuple[str, ...] = (),
        statistics: tuple[str, ...] = (),
    ) -> RawTable:
        uri = self.lake.path(self.name, "raw", kind)
        return RawTable(self.lake, uri, table_schema, self.name, partition_by, statistics)
