"""`raw/snapshots`: snapshots of tables, each committed atomically.

Epoch, LSN, table and relation version are partition columns. The log alone therefore identifies the
complete snapshots, and a reader of one snapshot opens the files of this snapshot only. The snapshot
of an empty table is a file without rows.

`raw/partial_snapshots` has the same columns, for snapshots of the rows that match a predicate
(docs/decisions/0040-partial-snapshots.md).
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.delta.files import FileWriter, WrittenFile
from pgcdc_assets.raw.delta.row_groups import gathered
from pgcdc_assets.raw.delta.scan import DataFile, data_files, with_statistics
from pgcdc_assets.raw.delta.sizes import uncompressed_bytes
from pgcdc_assets.raw.delta.table import CommitRefused, RawTable
from pgcdc_assets.table_name import TableName

SnapshotIdentity = tuple[int, Lsn, str, str]

# Bytes in memory of a row group. Two row groups of each connection are in memory.
ROW_GROUP_BYTES = 24 * 1024 * 1024

PARTITION_BY = ("epoch", "snapshot_lsn", "schema", "table", "relation_version")
STATISTICS = ("relation_id",)


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot of a table, with all transactions with commit_lsn < snapshot_lsn.

    Attributes:
        epoch: the epoch.
        snapshot_lsn: LSN of the snapshot.
        schema: the table's schema.
        table: the table's name.
        relation_version: version of the table's columns in `raw/relations`.
        row_count: number of rows.
        relation_id: OID of the relation; None in a lake of an early release.
    """

    epoch: int
    snapshot_lsn: Lsn
    schema: str
    table: str
    relation_version: int
    row_count: int
    relation_id: int | None = field(default=None, compare=False)

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    @property
    def position(self) -> Position:
        """Epoch and LSN."""
        return Position(self.epoch, self.snapshot_lsn)

    @property
    def identity(self) -> SnapshotIdentity:
        """Epoch, LSN, schema and table, a unique combination."""
        return self.epoch, self.snapshot_lsn, self.schema, self.table

    @property
    def key(self) -> str:
        """The position as text. Text order is the order of positions."""
        return f"{self.epoch:04d}-{int(self.snapshot_lsn):016X}"


def parse_snapshot_key(key: str) -> Position:
    """Read the key of a snapshot."""
    epoch, lsn = key.split("-")
    return Position(int(epoch), Lsn(int(lsn, 16)))


def snapshot_of_file(file: DataFile) -> Snapshot:
    """Return the snapshot of a file, with the row count of the file, 0 if it is unknown."""
    part = file.partition
    return Snapshot(
        int(part["epoch"]),
        Lsn(int(part["snapshot_lsn"])),
        part["schema"],
        part["table"],
        int(part["relation_version"]),
        file.row_count or 0,
        file.minimum.get("relation_id"),
    )


def _complete_snapshots(table: RawTable, loaded: DeltaTable, epoch: int | None) -> list[Snapshot]:
    snapshots: dict[SnapshotIdentity, Snapshot] = {}
    for file in with_statistics(table, data_files(loaded)):
        part = snapshot_of_file(file)
        known = snapshots.get(part.identity)
        row_count = part.row_count + (known.row_count if known is not None else 0)
        snapshots[part.identity] = replace(part, row_count=row_count)
    return [snapshots[key] for key in sorted(snapshots) if epoch in (None, key[0])]


def group_by_name(snapshots: Iterable[Snapshot]) -> dict[TableName, list[Snapshot]]:
    """Return the snapshots of each table, in the same order."""
    found: dict[TableName, list[Snapshot]] = {}
    for snapshot in snapshots:
        found.setdefault(snapshot.name, []).append(snapshot)
    return found


@dataclass(frozen=True)
class SnapshotStore:
    """The snapshots of one capture.

    Attributes:
        table: the Delta table.
        capture: the capture's name.
    """

    table: RawTable
    capture: str

    def land_snapshot(
        self,
        epoch: int,
        snapshot_lsn: Lsn,
        relation: Relation,
        relation_version: int,
        batches: Iterable[pa.RecordBatch],
        *,
        taken_at: dt.datetime | None = None,
    ) -> int:
        """Write and commit a snapshot, and return its row count.

        An exception of `batches` leaves no commit. An existing snapshot of the table at this LSN is
        not replaced.

        Args:
            epoch: the epoch.
            snapshot_lsn: LSN of the snapshot.
            relation: the table.
            relation_version: version of the table's columns in `raw/relations`.
            batches: batches with one column `new`, the texts of the rows.
            taken_at: time of the snapshot by the source's clock; None: unknown.

        Raises:
            TransientError: the lake cannot be written, or another process copied the same table at
                the same time.
        """
        landing = self.begin_snapshot(epoch, snapshot_lsn, relation, relation_version)
        landed = self.find(landing.snapshot, self.table.load_or_create())
        if landed is not None:
            return landed.row_count
        landing.write(batches)
        return landing.commit(taken_at)

    def begin_snapshot(
        self,
        epoch: int,
        snapshot_lsn: Lsn,
        relation: Relation,
        relation_version: int,
        *,
        name: TableName | None = None,
    ) -> SnapshotLanding:
        """Return a snapshot to write in ranges, which may be written at the same time.

        Args:
            name: the declared name; None: the relation's name at the source.
        """
        snapshot = Snapshot(
            epoch, snapshot_lsn, *(name or relation.name), relation_version, 0, relation.relation_id
        )
        return SnapshotLanding(self, snapshot, relation)

    def complete_snapshots(self, epoch: int | None = None) -> list[Snapshot]:
        """Return the complete snapshots of one epoch, or of all epochs, oldest first."""
        loaded = self.table.newest()
        return [] if loaded is None else _complete_snapshots(self.table, loaded, epoch)

    def size_bytes(self, snapshot: Snapshot) -> int:
        """Return the uncompressed size of a snapshot, from the Parquet footers."""
        loaded = self.table.load()
        files = [] if loaded is None else data_files(loaded)
        own = [file for file in files if snapshot_of_file(file).identity == snapshot.identity]
        return uncompressed_bytes(self.table, [file.stored_path for file in own])

    def times(self) -> dict[SnapshotIdentity, dt.datetime]:
        """Return the times of the snapshots whose commits recorded the time.

        The times in log entries that a person or another program has removed are unknown.
        """
        return {k: dt.datetime.fromisoformat(at) for k, at in self._recorded("taken_at").items()}

    def landed_rows(self) -> dict[SnapshotIdentity, int]:
        """Return the numbers of rows at the commits of the snapshots that recorded the number."""
        return self._recorded("row_count")

    def timelines(self, epoch: int) -> dict[int, Lsn]:
        """Return the newest snapshot of an epoch on each timeline that a commit has recorded."""
        newest: dict[int, Lsn] = {}
        for (of_epoch, lsn, *_), timeline in self._recorded("timeline").items():
            if of_epoch == epoch:
                newest[timeline] = max(lsn, newest.get(timeline, lsn))
        return newest

    def _recorded(self, name: str) -> dict[SnapshotIdentity, Any]:
        loaded = self.table.newest()
        entries = [] if loaded is None else self.table.remaining_entries(loaded)
        found = {}
        for record in (record for entry in entries for record in entry.records):
            if record.get(name) is not None:
                epoch, schema, table = record["copy"]
                found[epoch, Lsn.parse(record["snapshot_lsn"]), schema, table] = record[name]
        return found

    def find(self, snapshot: Snapshot, loaded: DeltaTable | None = None) -> Snapshot | None:
        """Find the complete snapshot with the same identity.

        Args:
            loaded: the load of the table to look into; None: a new one.
        """
        loaded = self.table.load() if loaded is None else loaded
        found = [] if loaded is None else _complete_snapshots(self.table, loaded, snapshot.epoch)
        return next((one for one in found if one.identity == snapshot.identity), None)


@dataclass
class SnapshotLanding:
    """A snapshot that is not committed yet: the files of its ranges."""

    store: SnapshotStore
    snapshot: Snapshot
    relation: Relation
    _writers: list[FileWriter] = field(default_factory=list, repr=False)
    _files: list[WrittenFile] = field(default_factory=list, repr=False)
    _earlier: list[WrittenFile] = field(default_factory=list, repr=False)
    _chunks: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def add(self, files: Iterable[WrittenFile]) -> None:
        """Add the files of a range that an earlier run has written."""
        self._earlier += files

    def keep(self, files: Iterable[WrittenFile]) -> None:
        """Leave files in place at `discard`, because a later run may add the files."""
        kept = {file.path for file in files}
        for writer in list(self._writers):
            if not kept.isdisjoint(writer.paths):
                self._writers.remove(writer)

    def write(self, batches: Iterable[pa.RecordBatch]) -> list[WrittenFile]:
        """Write one range of the rows. Several threads may write ranges in parallel.

        Args:
            batches: batches with one column `new`, the texts of the rows. An error of the iterable
                removes the files of the range.

        Returns:
            The files of the range.

        Raises:
            TransientError: the lake cannot be written.
        """
        # A thread encodes a full row group while the caller's thread decodes the next one. The
        # executor waits for its thread before the writer removes files after an error.
        with self._writer() as writer, ThreadPoolExecutor(1, "pgcdc encode") as encoder:
            encoding: Future[None] | None = None
            for rows in gathered(self._complete(batches), ROW_GROUP_BYTES):
                if encoding is not None:
                    encoding.result()
                if rows.nbytes < ROW_GROUP_BYTES:
                    # The last row group, and the only one of a small table, needs no thread.
                    writer.write(rows)
                else:
                    encoding = encoder.submit(writer.write, rows)
            if encoding is not None:
                encoding.result()
            files = writer.finish()
        self._files += files
        return files

    def commit(self, taken_at: dt.datetime | None = None, timeline: int | None = None) -> int:
        """Commit the snapshot, and return its row count.

        Args:
            taken_at: time of the snapshot by the source's clock; None: unknown.
            timeline: the server's timeline at the LSN of the snapshot; None: unknown.

        Raises:
            TransientError: the log cannot be written, or another process copied the same table at
                the same time.
        """
        table, snapshot = self.store.table, self.snapshot
        # Loaded here and not before: a commit reads every later entry of the log.
        loaded = table.load_or_create()
        landed = self.store.find(snapshot, loaded)
        if landed is not None:
            self.discard()
            return landed.row_count
        if not (self._files or self._earlier):
            # A file without rows is what makes the snapshot of an empty table.
            with self._writer() as writer:
                self._files += [
                    replace(file, statistics={**file.statistics, "minValues": self._relation_id})
                    for file in writer.finish(at_least_one_file=True)
                ]
        self._check_not_used(loaded)
        # All rows are as of this snapshot, whichever snapshot they were read in.
        partition = self._partition()
        files = [
            replace(file, partition_values=partition) for file in [*self._earlier, *self._files]
        ]
        name = snapshot.name.record_name
        # A commit may fail after the log names the files, for example in the write of a checkpoint.
        # The files then belong to the table: from here on `discard` leaves the files in place.
        writers, self._writers = self._writers, []
        try:
            table.commit(
                loaded,
                files,
                app_id=f"pgcdc:{self.store.capture}:{snapshot.epoch}:copy:{name}",
                app_version=int(snapshot.snapshot_lsn),
                record={
                    "copy": [snapshot.epoch, snapshot.schema, snapshot.table],
                    "snapshot_lsn": str(snapshot.snapshot_lsn),
                    "taken_at": taken_at and taken_at.isoformat(),
                    "timeline": timeline,
                    "row_count": sum(file.row_count for file in files),
                },
            )
        except CommitRefused as refusal:
            landed = self.store.find(snapshot)
            if landed is not None:
                return landed.row_count
            self._writers = writers
            raise TransientError(
                reason=f"Another process copied {self.relation.qualified_name} to {table.uri} at "
                "the same time. Nothing of this snapshot was committed; run it again."
            ) from refusal
        return sum(file.row_count for file in files)

    def _check_not_used(self, loaded: DeltaTable) -> None:
        """Check that no other process has completed a snapshot with files of this one.

        Another process may have continued the copy that this one continues, or this one.

        Raises:
            TransientError: another process has.
        """
        own = {file.path for file in [*self._earlier, *self._files]}
        if not own.isdisjoint(file.path for file in data_files(loaded)):
            raise TransientError(
                reason=f"Another process has completed the snapshot of "
                f"{self.relation.qualified_name} with ranges of this run. Run it again if a later "
                "snapshot is needed."
            )

    def discard(self) -> None:
        """Remove the written files, but not the files of a commit with an uncertain end."""
        for writer in self._writers:
            writer.discard()

    @property
    def _relation_id(self) -> dict[str, int]:
        """The minimum that identifies the relation, also of a file without rows."""
        return {"relation_id": self.relation.relation_id}

    def _writer(self) -> FileWriter:
        writer = self.store.table.writer(self._partition())
        self._writers.append(writer)
        return writer

    def _partition(self) -> dict[str, str]:
        partition = {name: str(getattr(self.snapshot, name)) for name in PARTITION_BY}
        return partition | {"snapshot_lsn": str(int(self.snapshot.snapshot_lsn))}

    def _complete(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        columns = self.store.table.schema
        schema = pa.schema([f for f in columns if f.name not in PARTITION_BY])
        relation_id = pa.scalar(self.relation.relation_id, pa.int64())
        for batch in batches:
            chunk = pa.scalar(next(self._chunks), pa.int32())
            values = {
                "relation_id": pa.repeat(relation_id, batch.num_rows),
                "chunk": pa.repeat(chunk, batch.num_rows),
                "new": batch.column("new"),
            }
            yield pa.RecordBatch.from_arrays([values[n] for n in schema.names], schema=schema)
