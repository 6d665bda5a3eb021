"""The oldest open transaction of a server, which the creation of a slot waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# The creation of a slot waits for the transactions that are open at its start
# (SnapBuildWaitSnapshot in src/backend/replication/logical/snapbuild.c). A prepared transaction has
# no process.
_OPEN_TRANSACTIONS = """
select l.transactionid::text, l.pid, p.gid
  from pg_locks l
  left join pg_prepared_xacts p on p.transaction = l.transactionid
 where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
 order by age(l.transactionid) desc
 limit 1
"""


@dataclass(frozen=True, slots=True)
class BlockingTransaction:
    """A transaction that blocks the creation of a slot.

    Attributes:
        xid: the transaction's id.
        pid: the transaction's process; None for a prepared transaction.
        gid: the identifier of a prepared transaction; else None.
    """

    xid: str
    pid: int | None
    gid: str | None

    def describe(self) -> str:
        """Return the transaction's description for a sentence."""
        if self.pid is None:
            return f"the prepared transaction {self.gid!r} (xid {self.xid})"
        return f"the open transaction {self.xid} of process {self.pid}"

    def remedy(self) -> str:
        """Return the statement that ends the transaction."""
        if self.pid is None:
            return f"end it with: commit prepared {self.gid!r}, or: rollback prepared {self.gid!r}"
        return f"end it with: select pg_terminate_backend({self.pid})"


def oldest_blocking_transaction(conn: Connection) -> BlockingTransaction | None:
    """Return the oldest open transaction with a transaction id, of any database."""
    with conn.cursor() as cursor:
        cursor.execute(_OPEN_TRANSACTIONS)
        row = cursor.fetchone()
    return None if row is None else BlockingTransaction(*row)
