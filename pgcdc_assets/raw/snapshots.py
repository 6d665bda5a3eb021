"""`raw/snapshots`: copies of tables, each one atomic commit.

A copy's epoch, LSN, table and relation version are partition values: the log alone says which
copies are complete, an empty table's copy is a file without rows, and a reader of one copy opens
its files only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.files import FileWriter
from pgcdc_assets.raw.layout import BUDGET_BYTES
from pgcdc_assets.raw.reading import data_files
from pgcdc_assets.raw.table import CommitRefused, RawTable

PARTITION_BY = ("epoch", "snapshot_lsn", "schema", "table", "relation_version")


@dataclass(frozen=True)
class Copy:
    """A complete copy of a table: every transaction with commit_lsn < snapshot_lsn is in it."""

    epoch: int
    snapshot_lsn: Lsn
    schema: str
    table: str
    relation_version: int
    row_count: int


@dataclass(frozen=True)
class SnapshotStore:
    """The copies of one capture."""

    table: RawTable
    capture: str

    def land_copy(
        self,
        epoch: int,
        snapshot_lsn: Lsn,
        relation: Relation,
        relation_version: int,
        batches: Iterable[pa.RecordBatch],
    ) -> int:
        """Write a copy and commit it; that commit makes it complete. Return its row count.

        An exception of the iterable leaves no commit. A copy of the table at this LSN that is there
        already is left as it is.

        Args:
            batches: one column `new`: the rows' texts.

        Raises:
            TransientError: the lake cannot be written, or another process copies the table too.
        """
        copy = Copy(epoch, snapshot_lsn, relation.schema, relation.table, relation_version, 0)
        table = self.table.load_or_create()
        landed = self._find(copy)
        if landed is not None:
            return landed.row_count
        partition = {name: str(getattr(copy, name)) for name in PARTITION_BY}
        partition["snapshot_lsn"] = str(int(snapshot_lsn))
        with self.table.writer(partition) as writer:
            self._write(writer, relation, batches)
            files = writer.finish(at_least_one_file=True)
        try:
            self.table.commit(
                table,
                files,
                app_id=f"pgcdc:{self.capture}:{epoch}:copy:{relation.qualified_name}",
                app_version=int(snapshot_lsn),
                record={"copy": relation.qualified_name, "snapshot_lsn": str(snapshot_lsn)},
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

    def complete_copies(self, epoch: int | None = None) -> list[Copy]:
        """List the complete copies, of one epoch or of all, oldest first."""
        loaded = self.table.load()
        if loaded is None:
            return []
        rows: dict[tuple[int, Lsn, str, str, int], int] = {}
        for file in data_files(loaded):
            part = file.partition
            key = (
                int(part["epoch"]),
                Lsn(int(part["snapshot_lsn"])),
                part["schema"],
                part["table"],
                int(part["relation_version"]),
            )
            rows[key] = rows.get(key, 0) + file.row_count
        return [Copy(*key, count) for key, count in sorted(rows.items()) if epoch in (None, key[0])]

    def _find(self, copy: Copy) -> Copy | None:
        wanted = (copy.epoch, copy.snapshot_lsn, copy.schema, copy.table)
        for found in self.complete_copies(copy.epoch):
            if (found.epoch, found.snapshot_lsn, found.schema, found.table) == wanted:
                return found
        return None

    def _write(
        self, writer: FileWriter, relation: Relation, batches: Iterable[pa.RecordBatch]
    ) -> None:
        schema = pa.schema([f for f in self.table.schema if f.name not in PARTITION_BY])
        held: list[pa.RecordBatch] = []
        for chunk, batch in enumerate(batches):
            columns = {
                "relation_id": pa.repeat(
                    pa.scalar(relation.relation_id, pa.int64()), batch.num_rows
                ),
                "chunk": pa.repeat(pa.scalar(chunk, pa.int32()), batch.num_rows),
                "new": batch.column("new"),
            }
            held.append(
                pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)
            )
            if sum(piece.nbytes for piece in held) >= BUDGET_BYTES:
                writer.write(pa.Table.from_batches(held))
                held = []
        if held:
            writer.write(pa.Table.from_batches(held))
