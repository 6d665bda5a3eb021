"""`raw/snapshots`: snapshots of tables, each committed atomically. A `Copy` is one such snapshot.

Epoch, LSN, table and relation version are partition columns. The log alone therefore identifies the
complete snapshots, and a reader of one snapshot opens the files of this snapshot only. The snapshot
of an empty table is a file without rows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.row_groups import gathered
from pgcdc_assets.raw.scan import DataFile, data_files
from pgcdc_assets.raw.sizes import uncompressed_bytes
from pgcdc_assets.raw.table import CommitRefused, RawTable
from pgcdc_assets.table_name import TableName

SnapshotIdentity = tuple[int, Lsn, str, str]

PARTITION_BY = ("epoch", "snapshot_lsn", "schema", "table", "relation_version")


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
    """

    epoch: int
    snapshot_lsn: Lsn
    schema: str
    table: str
    relation_version: int
    row_count: int

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


def snapshot_of_file(file: DataFile) -> Snapshot:
    """Return the snapshot of a file, with the row count of the file."""
    part = file.partition
    return Snapshot(
        int(part["epoch"]),
        Lsn(int(part["snapshot_lsn"])),
        part["schema"],
        part["table"],
        int(part["relation_version"]),
        file.row_count,
    )


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
        copy = Snapshot(epoch, snapshot_lsn, relation.schema, relation.table, relation_version, 0)
        table = self.table.load_or_create()
        landed = self._find(copy)
        if landed is not None:
            return landed.row_count
        partition = {name: str(getattr(copy, name)) for name in PARTITION_BY}
        partition["snapshot_lsn"] = str(int(snapshot_lsn))
        with self.table.writer(partition) as writer:
            for rows in gathered(self._complete(relation, batches)):
                writer.write(rows)
            files = writer.finish(at_least_one_file=True)
        try:
            self.table.commit(
                table,
                files,
                app_id=f"pgcdc:{self.capture}:{epoch}:copy:{relation.name.record_name}",
                app_version=int(snapshot_lsn),
                record={
                    "copy": [epoch, relation.schema, relation.table],
                    "snapshot_lsn": str(snapshot_lsn),
                    "taken_at": taken_at and taken_at.isoformat(),
                },
            )
        except CommitRefused as refusal:
            landed = self._find(copy)
            if landed is not None:
                return landed.row_count
            raise TransientError(
                reason=f"Another process copied {relation.qualified_name} to {self.table.uri} at "
                "the same time. Nothing of this snapshot was committed; run it again."
            ) from refusal
        return sum(file.row_count for file in files)

    def complete_snapshots(self, epoch: int | None = None) -> list[Snapshot]:
        """Return the complete snapshots of one epoch, or of all epochs, oldest first."""
        loaded = self.table.load()
        if loaded is None:
            return []
        snapshots: dict[SnapshotIdentity, Snapshot] = {}
        for file in data_files(loaded):
            part = snapshot_of_file(file)
            known = snapshots.get(part.identity)
            row_count = part.row_count + (known.row_count if known is not None else 0)
            snapshots[part.identity] = replace(part, row_count=row_count)
        return [snapshots[key] for key in sorted(snapshots) if epoch in (None, key[0])]

    def size_bytes(self, snapshot: Snapshot) -> int:
        """Return the uncompressed size of a snapshot, from the Parquet footers."""
        loaded = self.table.load()
        files = [] if loaded is None else data_files(loaded)
        own = [file.path for file in files if snapshot_of_file(file).identity == snapshot.identity]
        return uncompressed_bytes(self.table, own)

    def times(self) -> dict[SnapshotIdentity, dt.datetime]:
        """Return the times of the snapshots whose commits recorded the time."""
        loaded = self.table.load()
        if loaded is None:
            return {}
        times = {}
        for record in self.table.records(loaded, 0):
            if record.get("taken_at"):
                epoch, schema, table = record["copy"]
                key = (epoch, Lsn.parse(record["snapshot_lsn"]), schema, table)
                times[key] = dt.datetime.fromisoformat(record["taken_at"])
        return times

    def _find(self, snapshot: Snapshot) -> Snapshot | None:
        snapshots = self.complete_snapshots(snapshot.epoch)
        return next((found for found in snapshots if found.identity == snapshot.identity), None)

    def _complete(
        self, relation: Relation, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([f for f in self.table.schema if f.name not in PARTITION_BY])
        for chunk, batch in enumerate(batches):
            columns = {
                "relation_id": pa.repeat(
                    pa.scalar(relation.relation_id, pa.int64()), batch.num_rows
                ),
                "chunk": pa.repeat(pa.scalar(chunk, pa.int32()), batch.num_rows),
                "new": batch.column("new"),
            }
            yield pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)
