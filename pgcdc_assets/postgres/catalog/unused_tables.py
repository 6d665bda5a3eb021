"""Tables that never had a row, by their files.

Partitions are often created and attached ahead of time. If such a table has never had a row, its
attachment and its detachment move no row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import psycopg2.errors

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# A row extends the file at once, also if its transaction is rolled back. Only VACUUM makes the file
# shorter, and sets reltuples (-1 before). TRUNCATE and each rewrite give the table another file.
# A partitioned table has no rows of its own. `pg_relation_size` waits for ALTER TABLE and TRUNCATE.
_UNUSED = """
set local lock_timeout = '200ms';
select c.oid::bigint
  from pg_class c
 where c.oid = any(%s::bigint[]::oid[])
   and (c.relkind = 'p'
        or (c.relkind = 'r' and c.relfilenode = c.oid and c.reltuples = -1
            and pg_relation_size(c.oid) = 0))
"""


def read_unused_tables(conn: Connection, oids: Iterable[int]) -> frozenset[int]:
    """Return those of some tables that never had a row; none if a table is locked.

    Args:
        conn: a connection in autocommit mode.
    """
    asked = sorted(oids)
    if asked:
        with contextlib.suppress(psycopg2.errors.LockNotAvailable), conn.cursor() as cursor:
            cursor.execute(_UNUSED, (asked,))
            return frozenset(row[0] for row in cursor)
    return frozenset()
