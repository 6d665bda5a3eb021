"""Prepared transactions between their PREPARE TRANSACTION and their end.

With `two_phase` the server sends the rows at PREPARE TRANSACTION: Begin Prepare, changes and
Prepare, or Stream Prepare after the blocks of a streamed transaction (53.5 Logical Streaming
Replication Protocol). Commit Prepared or Rollback Prepared follows at any later time, also in a
later stream, and repeats gid and transaction id only. Of a transaction without changes, such as one
that only locked rows, Postgres 18 sends no Begin Prepare, and earlier versions no Prepare either.

The server does not send a Prepare again that is below the start of the stream. The landing of a
window therefore stores the prepared transactions that do not end in their window, before the
window is confirmed. The exception are transactions that were prepared before the slot had
`two_phase`: the server sends Begin Prepare and Prepare directly before Commit Prepared, also in a
later stream (reorderbuffer.c, ReorderBufferFinishPrepared).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import pyarrow as pa

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.arrow_batch import Announced
from pgcdc_assets.protocol.open_transaction import OpenTransaction, Spool, StreamedRelation
from pgcdc_assets.protocol.transaction_messages import Prepared


class PreparedKey(NamedTuple):
    """The identity of a prepared transaction in one epoch.

    A gid may be used again after the end of its transaction, and a transaction id after a
    wraparound.

    Attributes:
        lsn: LSN of the PREPARE record.
        xid: id of the top-level transaction.
        gid: the global identifier of PREPARE TRANSACTION.
    """

    lsn: Lsn
    xid: int
    gid: str


@dataclass(frozen=True)
class PreparedTransaction:
    """A prepared transaction and its rows.

    Attributes:
        key: the identity.
        time_us: time of PREPARE TRANSACTION in microseconds since 1970.
        transaction: what its commit needs besides the rows.
        read: function that yields the rows in the schema `open_transaction.SPOOLED`.
    """

    key: PreparedKey
    time_us: int
    transaction: OpenTransaction
    read: Callable[[], Iterator[pa.RecordBatch]]


class PreparedArchive(Protocol):
    """The prepared transactions that earlier landings have stored."""

    def find(self, xid: int, gid: str) -> PreparedTransaction | None:
        """Return the stored transaction that has not ended; None if there is none."""

    def check_unknown(self, xid: int, gid: str, commit_lsn: Lsn) -> None:
        """Check that a transaction whose PREPARE was not sent has no rows.

        Raises:
            RawZoneError: the rows of the transaction are missing.
        """


class NothingPrepared:
    """The archive of a stream that begins with the slot. It implements `PreparedArchive`."""

    def find(self, xid: int, gid: str) -> PreparedTransaction | None:
        """Return None."""
        return None

    def check_unknown(self, xid: int, gid: str, commit_lsn: Lsn) -> None:
        """Accept any transaction."""


class PreparedTransactions:
    """The prepared transactions of a stream, in the spool and in the archive.

    Args:
        spool: keeps the rows until the archive has them.
        archive: the stored transactions.

    Attributes:
        ended: the stored transactions that ended in this window.
    """

    def __init__(self, spool: Spool, archive: PreparedArchive) -> None:
        self._spool = spool
        self._archive = archive
        self._spooled: dict[tuple[int, str], PreparedTransaction] = {}
        self.ended: list[PreparedKey] = []

    def begin_window(self) -> None:
        """Continue with the next window of the same stream."""
        self.ended = []

    def add(self, prepared: Prepared, transaction: OpenTransaction) -> None:
        """Add a transaction at its PREPARE."""
        key = PreparedKey(Lsn(prepared.lsn), prepared.xid, prepared.gid)
        self._spooled[key.xid, key.gid] = PreparedTransaction(
            key, prepared.time_us, transaction, partial(self._spool.read, key.xid)
        )

    def find(self, xid: int, gid: str, commit_lsn: Lsn) -> PreparedTransaction | None:
        """Return the transaction of a COMMIT PREPARED; None for a transaction without rows.

        Raises:
            RawZoneError: the rows of the transaction are missing.
        """
        found = self._spooled.get((xid, gid)) or self._archive.find(xid, gid)
        if found is None:
            self._archive.check_unknown(xid, gid, commit_lsn)
        return found

    def end(self, xid: int, gid: str) -> None:
        """Drop a transaction at its end. An unknown transaction is ignored."""
        stored = self._archive.find(xid, gid)
        if stored is not None and stored.key not in self.ended:
            self.ended.append(stored.key)
        if self._spooled.pop((xid, gid), None) is not None:
            self._spool.drop(xid)

    def prepared_between(self, start: int, end: int) -> list[PreparedTransaction]:
        """Return the transactions in the spool with start <= LSN of PREPARE < end."""
        return [each for each in self._spooled.values() if start <= each.key.lsn < end]

    def drop_stored(self, keys: Iterable[PreparedKey]) -> None:
        """Drop the rows of transactions that the archive has from now on."""
        for key in keys:
            del self._spooled[key.xid, key.gid]
            self._spool.drop(key.xid)


def begin_prepared(xid: int, announced: Iterable[Announced]) -> OpenTransaction:
    """Return a transaction at its Begin Prepare.

    Args:
        xid: the transaction's id.
        announced: the relations that the stream has announced to whole transactions. They are valid
            in the prepared transaction, unlike in a block of a streamed transaction.
    """
    transaction = OpenTransaction(xid, has_xids=False)
    for each in announced:
        transaction.valid[each.relation.relation_id] = len(transaction.announced)
        transaction.announced.append(StreamedRelation(each.relation, 0, each.number, each.version))
    return transaction


def own_announcements(transaction: OpenTransaction) -> list[Announced]:
    """Return the relations that a prepared transaction has announced to later transactions."""
    own = (transaction.announced[index] for index in transaction.valid.values())
    return [Announced(each.relation, each.version, each.number) for each in own if each.xid]
