"""`raw/prepared`: prepared transactions whose end was not captured in the window of their PREPARE.

The server does not send these transactions again. A landing stores their rows before the commit of
its window, and the landing of the window with COMMIT PREPARED copies the rows to `raw/changes`.

A transaction has a row with op `prepare`, a row with op `relation` per announced relation, and the
rows of its changes. The relations are as announced: the catalog does not show a prepared
transaction, so its relation versions are completed at its commit. A row with op `ended` is written
before the window is committed in which the transaction ends. If the window is not committed, the
transaction has not ended: such a row is valid only if its window is captured. A row with op
`unknown` is a transaction that was prepared before the slot had two_phase. The server sends
its rows at its commit, but sends nothing if it has no rows.

Files are removed when all their transactions have ended in captured windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.errors import RawZoneError, TransientError, renewal_command
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.open_transaction import OpenTransaction, StreamedRelation
from pgcdc_assets.protocol.prepared_transactions import PreparedKey, PreparedTransaction
from pgcdc_assets.protocol.relation import Relation, ReplicaIdentity
from pgcdc_assets.raw.delta.compaction import removals
from pgcdc_assets.raw.delta.files import writer_of
from pgcdc_assets.raw.delta.scan import DataFile, UnreadableFile, data_files, scan
from pgcdc_assets.raw.delta.table import CommitRefused, RawTable
from pgcdc_assets.raw.prepared_rows import (
    ENDED,
    PREPARE,
    RELATION,
    UNKNOWN,
    fact_rows,
    key_row,
    parse_streamed_relation,
    to_spooled,
    write_changes,
)
from pgcdc_assets.raw.schema import PREPARED

STATISTICS = ("epoch", "prepare_lsn", "xid")

_FACTS = (PREPARE, RELATION, ENDED, UNKNOWN)
_KEY = ("prepare_lsn", "xid", "gid")
_ROW_COLUMNS = ("ordinal", "op", "relation", "old_kind", "old", "new", "unchanged")
_ATTEMPTS = 5


@dataclass
class _Stored:
    """The facts of a stored transaction: its announced relations, its end, its files' writers."""

    key: PreparedKey
    epoch: int
    time_us: int
    origin: str | None
    row_count: int
    is_unknown: bool
    announced: dict[int, StreamedRelation]
    writers: set[str]
    ended_by: int | None = None


@dataclass(frozen=True)
class PreparedStore:
    """The table of prepared transactions of one capture.

    Attributes:
        table: the Delta table.
        capture: the capture's name.
    """

    table: RawTable
    capture: str

    def two_phase_from(self, epoch: int) -> Lsn | None:
        """Return the LSN from which on each PREPARE of an epoch is captured; None without one."""
        loaded = self.table.load()
        if loaded is None:
            return None
        version = loaded.transaction_version(self._two_phase_app_id(epoch))
        return None if version is None else Lsn(version)

    def begin(self, epoch: int, lsn: Lsn, open_now: Iterable[tuple[int, str]]) -> None:
        """Record that the slot has two_phase, before the slot has it.

        Args:
            epoch: the epoch.
            lsn: end of the WAL now.
            open_now: xid and gid of the transactions that are prepared now.

        Raises:
            TransientError: the lake cannot be written.
        """
        rows = [
            {"epoch": epoch, "prepare_lsn": int(lsn), "xid": xid, "gid": gid, "op": UNKNOWN}
            for xid, gid in open_now
        ]
        self._commit(rows, (), facts={self._two_phase_app_id(epoch): int(lsn)})

    def unfinished(self, epoch: int, captured_through: Lsn) -> list[PreparedTransaction]:
        """Return the transactions of an epoch that have not ended in a captured window.

        Transactions of op `unknown` are included, unless their PREPARE was captured after all.

        Raises:
            RawZoneError: rows of a transaction are missing.
        """
        unfinished = [
            stored
            for stored in self._read()
            if stored.epoch == epoch and not _has_ended(stored, epoch, captured_through)
        ]
        sent = {each.key[1:] for each in unfinished if not each.is_unknown}
        return [
            self._transaction(stored)
            for stored in unfinished
            if not stored.is_unknown or stored.key[1:] not in sent
        ]

    def write(
        self,
        epoch: int,
        prepared: Sequence[PreparedTransaction],
        ended: Iterable[PreparedKey],
        window_end: Lsn,
    ) -> None:
        """Store transactions, and the ends of stored transactions, in one commit.

        Args:
            epoch: the epoch.
            prepared: transactions that the table does not have.
            ended: the keys of stored transactions that end in the window.
            window_end: end of the window.

        Raises:
            TransientError: the lake cannot be written, or other processes wrote at each attempt.
        """
        rows = [
            {"epoch": epoch, **key_row(key), "op": ENDED, "ended_by": int(window_end)}
            for key in ended
        ]
        self._commit(rows, [(epoch, each) for each in prepared])

    def remove_ended(self, epoch: int, captured_through: Lsn) -> int:
        """Remove the files whose transactions have all ended, and return their number.

        The transactions of earlier epochs have ended: the next epoch's slot sends them whole.

        Raises:
            TransientError: the lake cannot be written.
        """
        loaded = self.table.load()
        if loaded is None:
            return 0
        files = data_files(loaded)
        stored = self._read()
        kept = {
            writer
            for each in stored
            if not _has_ended(each, epoch, captured_through)
            for writer in each.writers
        }
        # The row of an end is necessary as long as the file of its transaction is kept.
        while more := {w for each in stored if each.writers & kept for w in each.writers} - kept:
            kept |= more
        gone = [file for file in files if writer_of(file.path) not in kept]
        if gone:
            self._commit([], (), removed=gone)
        return len(gone)

    def _two_phase_app_id(self, epoch: int) -> str:
        return f"pgcdc:{self.capture}:{epoch}:two_phase"

    def _commit(
        self,
        rows: list[dict[str, Any]],
        prepared: Sequence[tuple[int, PreparedTransaction]],
        *,
        removed: Sequence[DataFile] = (),
        facts: dict[str, int] | None = None,
    ) -> None:
        loaded = self.table.load_or_create()
        with self.table.writer() as writer:
            rows = rows + [row for epoch, each in prepared for row in fact_rows(epoch, each)]
            if rows:
                writer.write(pa.Table.from_pylist(rows, schema=PREPARED))
            for epoch, each in prepared:
                write_changes(writer, epoch, each)
            files = writer.finish()
        for _ in range(_ATTEMPTS):
            try:
                self.table.commit(
                    loaded,
                    files,
                    removed=removals(removed),
                    app_id=f"pgcdc:{self.capture}:prepared",
                    app_version=loaded.version() + 1,
                    facts=facts,
                )
            except CommitRefused:
                # A maintenance removes ended transactions beside a landing.
                loaded = self.table.load_or_create()
            else:
                return
        writer.discard()
        raise TransientError(
            reason=f"Other processes wrote to {self.table.uri} at each attempt. Nothing of this "
            "attempt was committed; run it again."
        )

    def _read(self) -> list[_Stored]:
        """Read the facts of all stored transactions."""
        loaded = self.table.load()
        found: dict[tuple[int, PreparedKey], _Stored] = {}
        ends: list[tuple[tuple[int, PreparedKey], int, str]] = []
        for file in [] if loaded is None else data_files(loaded):
            columns = ["epoch", *_KEY, "op", "prepared_at", "origin", "relation", "new", "ended_by"]
            columns.append("row_count")
            is_fact = pc.field("op").isin(_FACTS)
            for row in _rows(self.table, file, columns, is_fact):
                key = PreparedKey(Lsn(row["prepare_lsn"]), row["xid"], row["gid"])
                if row["op"] == ENDED:
                    ends.append(((row["epoch"], key), row["ended_by"], writer_of(file.path)))
                elif row["op"] == RELATION:
                    index, relation = parse_streamed_relation(row["new"][0], key.xid)
                    found[row["epoch"], key].announced[index] = relation
                else:
                    found[row["epoch"], key] = _Stored(
                        key,
                        row["epoch"],
                        0 if row["prepared_at"] is None else _microseconds(row["prepared_at"]),
                        row["origin"],
                        row["row_count"] or 0,
                        row["op"] == UNKNOWN,
                        {},
                        {writer_of(file.path)},
                    )
        unknown = {(e.epoch, *e.key[1:]): e for e in found.values() if e.is_unknown}
        for (epoch, key), ended_by, writer in ends:
            for each in (found.get((epoch, key)), unknown.get((epoch, *key[1:]))):
                if each is not None:
                    each.writers.add(writer)
                    each.ended_by = max(ended_by, each.ended_by or 0)
        return list(found.values())

    def _transaction(self, stored: _Stored) -> PreparedTransaction:
        transaction = OpenTransaction(stored.key.xid, has_xids=False, origin=stored.origin)
        missing = StreamedRelation(Relation(0, "", "", ReplicaIdentity.DEFAULT, ()), 0, 0)
        last = max(stored.announced, default=-1)
        transaction.announced = [stored.announced.get(i, missing) for i in range(last + 1)]
        read = partial(self._read_changes, stored)
        return PreparedTransaction(stored.key, stored.time_us, transaction, read)

    def _read_changes(self, stored: _Stored) -> Iterator[pa.RecordBatch]:
        """Yield the changes of a transaction in their order, in the schema `SPOOLED`."""
        loaded = self.table.load()
        files = [] if loaded is None else data_files(loaded)
        key, count = stored.key, 0
        condition = pc.field("ordinal").is_valid() & (pc.field("epoch") == stored.epoch)
        condition &= (pc.field("prepare_lsn") == int(key.lsn)) & (pc.field("xid") == key.xid)
        wanted = [file for file in files if _may_hold(file, stored)]
        try:
            for batch in scan(self.table, _in_order(wanted), _ROW_COLUMNS, condition):
                ordinals = batch.column("ordinal").to_numpy()
                if not (ordinals == np.arange(count, count + len(ordinals))).all():
                    break
                count += len(ordinals)
                yield to_spooled(batch, key.xid)
        except UnreadableFile:
            count = -1
        if count != stored.row_count:
            raise RawZoneError(
                raw_zone=self.table.uri,
                reason=f"rows of the prepared transaction {key.gid!r} (xid {key.xid}), prepared at "
                f"{key.lsn}, are missing, and the server does not send them again. Run "
                f"{renewal_command(self.capture)}, which takes new snapshots.",
            )


def _has_ended(stored: _Stored, epoch: int, captured_through: Lsn) -> bool:
    if stored.epoch != epoch:
        # A later epoch may have begun after the caller looked at the epochs.
        return stored.epoch < epoch
    return stored.ended_by is not None and stored.ended_by <= captured_through


def _may_hold(file: DataFile, stored: _Stored) -> bool:
    # Another program may write files without statistics.
    lsn = int(stored.key.lsn)
    least, most = file.minimum, file.maximum
    return bool(least.get("prepare_lsn", lsn) <= lsn <= most.get("prepare_lsn", lsn))


def _in_order(files: Iterable[DataFile]) -> list[DataFile]:
    """Return files in the order of writing: a writer numbers its files."""
    return sorted(files, key=lambda file: file.path)


def _rows(
    table: RawTable, file: DataFile, columns: Sequence[str], condition: pc.Expression
) -> Iterator[dict[str, Any]]:
    for batch in scan(table, [file], columns, condition):
        yield from batch.to_pylist()


def _microseconds(time: Any) -> int:
    return int(pa.scalar(time, pa.timestamp("us", tz="UTC")).value)
