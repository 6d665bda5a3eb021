"""The transactions whose changes of the catalog a query sees.

A commit is visible after its record is flushed, and with synchronous replication after the standby
has confirmed the record. The server sends the changes of a transaction as soon as its commit record
is flushed. A capture may therefore read a transaction with an ALTER TABLE before the catalog shows
the new columns.

Sources: RecordTransactionCommit and CommitTransaction in src/backend/access/transam/xact.c.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.errors import TransientError

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

# The commit waits for a synchronous standby. While the standby is down, no transaction commits.
VISIBLE_SECONDS = 30.0

_POLL_SECONDS = 0.005
_IDS = 2**32


@dataclass(frozen=True, slots=True)
class VisibleTransactions:
    """The top-level transactions that a snapshot sees. Ids are modulo 2^32.

    A standby sends what it has replayed, so its snapshots see each transaction of its streams.

    Attributes:
        next_id: id of the first transaction that had not begun.
        open_ids: ids of the transactions that were open; none on a standby, which lists none.
            There, the LSN of a later commit tells that it was open.
    """

    next_id: int
    open_ids: frozenset[int]

    @classmethod
    def read(cls, conn: Connection) -> VisibleTransactions:
        """Read the transactions that a query sees now. Later queries see these as well."""
        with conn.cursor() as cursor:
            cursor.execute("select pg_current_snapshot()::text")
            ((text,),) = cursor.fetchall()
        _, end, open_ids = text.split(":")
        return cls(
            int(end) % _IDS, frozenset(int(each) % _IDS for each in open_ids.split(",") if each)
        )

    def has(self, xid: int) -> bool:
        """Return whether the snapshot sees a transaction whose commit record is in the WAL."""
        has_begun = (xid - self.next_id) % _IDS >= _IDS // 2
        return has_begun and xid not in self.open_ids


def wait_until_visible(conn: Connection, xid: int) -> VisibleTransactions:
    """Wait until queries see a transaction whose commit record is in the WAL.

    Returns:
        The transactions that queries see after the wait.

    Raises:
        TransientError: the commit waits too long for a synchronous standby.
    """
    began = time.monotonic()
    while not (visible := VisibleTransactions.read(conn)).has(xid):
        if time.monotonic() - began > VISIBLE_SECONDS:
            raise TransientError(
                reason=f"The commit of transaction {xid} is in the WAL, but has not been visible "
                f"for {VISIBLE_SECONDS:.0f} seconds: it waits for a standby of "
                "synchronous_standby_names. The catalog does not show the transaction's tables. "
                "Start the standby, or take it out of this setting. No change is lost; "
                "run it again."
            )
        time.sleep(_POLL_SECONDS)
    return visible
