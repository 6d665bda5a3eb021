"""The oldest open transaction of a server, which the creation of a slot waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# The creation of a slot waits for the transactions that are open at its start
# (SnapBuildWaitSnapshot in src/backend/replication/logical/snapbuild.c). A prepared transaction has
# no process.
_OPEN_TRANSACTIONS = """
select l.transactionid::text, l.pid, p.gid, p.database::text
  from pg_locks l
  left join pg_prepared_xacts p on p.transaction = l.transactionid
 where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
   and (l.pid is not null or p.gid is not null)
 order by age(l.transactionid) desc
 limit 1
"""

# Whether lock `l` of `pg_locks` is a lock on a table that writers of rows take, in this database.
IS_WRITER_LOCK = """
l.locktype = 'relation' and l.granted
   and l.database = (select oid from pg_database where datname = current_database())
   and l.mode in ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
                  'AccessExclusiveLock')
""".strip()


@dataclass(frozen=True, slots=True)
class BlockingTransaction:
    """A transaction that blocks the creation of a slot.

    Attributes:
        xid: the transaction's id.
        pid: the transaction's process; None for a prepared transaction.
        gid: the identifier of a prepared transaction; else None.
        database: the database of a prepared transaction, where alone it can be ended; else None.
    """

    xid: str
    pid: int | None
    gid: str | None = None
    database: str | None = None

    def describe(self) -> str:
        """Return the transaction's description for a sentence."""
        if self.gid is not None:
            return f"the prepared transaction {_literal(self.gid)} (xid {self.xid})"
        return f"the open transaction {self.xid} of process {self.pid}"

    def remedy(self) -> str:
        """Return the statement that ends the transaction."""
        if self.gid is not None:
            return f"end it in database {quoted(self.database or '')} with: {ending_sql(self.gid)}"
        return f"end it with: select pg_terminate_backend({self.pid})"


def ending_sql(gid: str) -> str:
    """Return the two statements that end a prepared transaction, for a sentence."""
    return f"commit prepared {_literal(gid)}, or: rollback prepared {_literal(gid)}"


def oldest_blocking_transaction(conn: Connection) -> BlockingTransaction | None:
    """Return the oldest open transaction with a transaction id, of any database."""
    with conn.cursor() as cursor:
        cursor.execute(_OPEN_TRANSACTIONS)
        row = cursor.fetchone()
    return None if row is None else BlockingTransaction(*row)


def _literal(text: str) -> str:
    """Return an SQL literal. With standard_conforming_strings, a backslash is a character."""
    return "'" + text.replace("'", "''") + "'"
