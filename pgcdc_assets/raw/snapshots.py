"""`raw/snapshots`: copies of tables, each one atomic commit.

A copy's epoch, LSN, table and relation version are partition values: the log alone says which
copies are complete, an empty table's copy is a file without rows, and a reader of one copy opens
its files only.
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
    """A complete copy of a table: every transaction with commit_lsn < snapshot_lsn is in it."""

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
        """Epoch, LSN, schema and table, which no two snapshots share."""
        return self.epoch, self.snapshot_lsn, self.schema, self.table

    @property
    def key(self) -> str:
        """The position as text, which sorts as positions do."""
        return f"{self.epoch:04d}-{int(self.snapshot_lsn):016X}"


def snapshot_of_file(file: DataFile) -> Snapshot:
    """Say which copy a file belongs to; its rows are those of the file."""
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
    """The copies of one capture."""

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
        """Write a copy and commit it; that commit makes it complete. Return its row count.

        An exception of the iterable leaves no commit. A copy of the table at this LSN that is there
        already is left as it is.

        Args:
            batches: one column `new`: the rows' texts.
            taken_at: when the copy's moment was, by the source's clock.

        Raises:
            TransientError: the lake cannot be written, or another process copies the table too.
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
                "the same moment; nothing of this copy was committed. Run it again."
            ) from refusal
        return sum(file.row_count for file in files)

    def complete_snapshots(self, epoch: int | None = None) -> list[Snapshot]:
        """List the complete copies, of one epoch or of all, oldest first."""
        loaded = self.table.load()
        if loaded is None:
            return []
        copies: dict[SnapshotIdentity, Snapshot] = {}
        for file in data_files(loaded):
            part = snapshot_of_file(file)
            known = copies.get(part.identity)
            row_count = part.row_count + (known.row_count if known is not None else 0)
            copies[part.identity] = replace(part, row_count=row_count)
        return [copies[key] for key in sorted(copies) if epoch in (None, key[0])]

    def size_bytes(self, copy: Snapshot) -> int:
        """Count the bytes of a copy's rows, not compressed, by the footers of its files."""
        loaded = self.table.load()
        files = [] if loaded is None else data_files(loaded)
        own = [file.path for file in files if snapshot_of_file(file).identity == copy.identity]
        return uncompressed_bytes(self.table, own)

    def times(self) -> dict[SnapshotIdentity, dt.datetime]:
        """Say when copies were taken, as far as their commits do."""
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

    def _find(self, copy: Snapshot) -> Snapshot | None:
        copies = self.complete_snapshots(copy.epoch)
        return next((found for found in copies if found.identity == copy.identity), None)

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
