"""The wait for the transactions that have already written to given tables.

The server decodes each change with the catalog as of the change. A row that was written to a table
before the table joined the publication is therefore not in the stream, even if its transaction
commits later. ALTER PUBLICATION and ALTER TYPE wait for no writer. A snapshot must have these rows,
so it waits for the end of their transactions.

Source: SnapBuildDistributeNewCatalogSnapshot in src/backend/replication/logical/snapbuild.c.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from pgcdc_assets.postgres.blocking_transactions import IS_WRITER_LOCK, BlockingTransaction
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

_logger = logging.getLogger(__name__)

# Reading pg_locks holds up other sessions for a moment, so a long wait looks less often.
_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 1.0
_QUIET_SECONDS = 1.0

# A writer holds its locks until it is visible. A transaction without an id has not written yet. A
# subtransaction has an id of its own, and the locks are those of the whole transaction: the oldest
# id is the transaction's. A prepared transaction has no process.
_WRITERS = f"""
with recursive tree (root, oid) as (
    select r, r from unnest(%(tables)s::bigint[]::oid[]) r
    union
    select t.root, i.inhrelid from tree t join pg_inherits i on i.inhparent = t.oid)
select distinct on (t.root, x.pid, x.virtualtransaction)
       t.root::bigint, x.transactionid::text, x.pid, p.gid, p.database::text
  from tree t
  join pg_locks l on l.relation = t.oid
  join pg_locks x on x.virtualtransaction = l.virtualtransaction
                 and x.pid is not distinct from l.pid
  left join pg_prepared_xacts p on p.transaction = x.transactionid
 where {IS_WRITER_LOCK}
   and x.locktype = 'transactionid' and x.mode = 'ExclusiveLock' and x.granted
   and (x.pid is not null or p.gid is not null)
 order by t.root, x.pid, x.virtualtransaction, age(x.transactionid) desc
"""

_ENDED = """
select w.xid
  from unnest(%s::text[]) w(xid)
 where not exists (select from pg_locks l
                    where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
                      and l.transactionid::text = w.xid)
"""


def wait_for_writers(
    settings: ConnectionSettings, table_ids: Collection[int]
) -> dict[int, BlockingTransaction]:
    """Wait until the transactions end that have written to tables; later ones are not waited for.

    Args:
        settings: the source database. The wait takes `lock_timeout_ms` at most; 0: no limit.
        table_ids: OIDs of the tables; of a partitioned table its partitions count as well.

    Returns:
        By OID of the table a transaction that has not ended in time.

    Raises:
        ConnectionLost: the server is down, or went away.
    """
    if not table_ids:
        return {}
    with query_connection(settings, "snapshot") as conn:
        open_ = _read_writers(conn, table_ids)
        began = time.monotonic()
        is_reported = False
        while open_:
            seconds = time.monotonic() - began
            if settings.lock_timeout_ms and seconds * 1000 > settings.lock_timeout_ms:
                break
            if seconds > _QUIET_SECONDS and not is_reported:
                is_reported = True
                first = next(iter(open_))[1]
                _logger.info("A snapshot waits for %s", first.describe())
            time.sleep(min(_POLL_SECONDS + seconds / 20, _LONGEST_POLL_SECONDS))
            with conn.cursor() as cursor:
                cursor.execute(_ENDED, ([writer.xid for _, writer in open_],))
                ended = {xid for (xid,) in cursor}
            open_ = [(oid, writer) for oid, writer in open_ if writer.xid not in ended]
        return dict(open_)


def _read_writers(
    conn: Connection, table_ids: Collection[int]
) -> list[tuple[int, BlockingTransaction]]:
    with conn.cursor() as cursor:
        cursor.execute(_WRITERS, {"tables": sorted(table_ids)})
        return [(oid, BlockingTransaction(*facts)) for oid, *facts in cursor]
