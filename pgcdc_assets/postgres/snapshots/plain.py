"""An exported snapshot with an exact LSN, without a replication slot.

A commit is in the WAL before it is visible, so a plain snapshot has no LSN in general. A snapshot
has an LSN for given tables if no transaction that wrote to these tables is between the two steps.
Each transaction holds the locks of its written tables until it is visible, so the lock table
proves this (docs/decisions/0037-snapshots-without-a-slot.md).

Sources: RecordTransactionCommit and CommitTransaction in src/backend/access/transam/xact.c.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import psycopg2

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.blocking_transactions import IS_WRITER_LOCK
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.slots.creation import ExportedSnapshot
from pgcdc_assets.postgres.wal.positions import advance_wal, read_current_lsn

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_logger = logging.getLogger(__name__)

# On a table that is written to all the time, an attempt finds a writer in its commit most of the
# time. The attempts end early enough that a snapshot by a slot is not delayed much.
_ATTEMPT_SECONDS = 2.0
_PAUSE_SECONDS = 0.002
_FLUSH_SECONDS = 10.0
_POLL_SECONDS = 0.01

# In READ COMMITTED, each statement of the block has a snapshot of its own. The order matters: the
# exported snapshot, then the LSN, then the locks and the states, then the second snapshot.
# A client's session that reads from its client, or waits for a lock, is not in its commit. A commit
# may write to the client: the warning of a canceled wait for a synchronous standby. The state of a
# worker of logical replication may be that of an idle transaction during its commit.
_ATTEMPT = """
rollback;
begin isolation level read committed, read only;
do $pgcdc$
declare
  wanted oid[];
  made record;
  writers bigint;
  later text;
begin
  select pg_export_snapshot() as name, pg_current_snapshot()::text as visible,
         pg_current_wal_insert_lsn()::text as lsn, statement_timestamp()::text as taken_at,
         ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int as timeline
    into made;
  with recursive tree (oid) as (
    select unnest('{{{oids}}}'::oid[])
     union
    select i.inhrelid from pg_inherits i join tree on i.inhparent = tree.oid)
  select array_agg(oid) into wanted from tree;
  select count(*) into writers
    from pg_locks l left join pg_stat_activity a on a.pid = l.pid
   where {is_writer_lock} and l.relation = any(wanted)
     and not coalesce(a.backend_type = 'client backend'
                      and (a.state in ('idle in transaction', 'idle in transaction (aborted)')
                           or a.wait_event = 'ClientRead' or a.wait_event_type = 'Lock'), false);
  select pg_current_snapshot()::text into later;
  perform set_config('pgcdc.snapshot', json_build_object(
    'name', made.name, 'lsn', made.lsn, 'taken_at', made.taken_at,
    'timeline', made.timeline, 'writers', writers, 'is_same', later = made.visible)::text, false);
end
$pgcdc$;
select current_setting('pgcdc.snapshot');
"""


@contextlib.contextmanager
def export_plain_snapshot(
    settings: ConnectionSettings, table_ids: Collection[int]
) -> Iterator[ExportedSnapshot | None]:
    """Export a snapshot that is exact for tables, and hold it for the block.

    A transaction that has changed one of the tables is in the snapshot if and only if its commit
    LSN is below `consistent_point`. Old transactions that wait for their clients are not waited
    for.

    Args:
        table_ids: OIDs of the tables; of a partitioned table its partitions count as well.

    Yields:
        The snapshot; None on a standby, if the proof did not succeed in a short time, or if the
        server does not allow the statements.

    Raises:
        ConnectionLost: the server is down, or went away.
    """
    with query_connection(settings, "snapshot", statement_timeout_ms=0) as conn:
        snapshot = None
        try:
            snapshot = _attempt_repeatedly(conn, settings, table_ids)
        except psycopg2.OperationalError:
            raise
        except psycopg2.Error as error:
            # For example, a server without PL/pgSQL.
            _logger.info("A slot exports the snapshot: SQLSTATE %s", error.pgcode)
        yield snapshot


def _attempt_repeatedly(
    conn: Connection, settings: ConnectionSettings, table_ids: Collection[int]
) -> ExportedSnapshot | None:
    with query_connection(settings, "snapshot") as current:
        with current.cursor() as cursor:
            cursor.execute("select pg_is_in_recovery()")
            if cursor.fetchone() == (True,):
                return None
        # Two snapshots must not have one LSN, nor a snapshot that of the end of a window.
        advance_wal(current)
        deadline = time.monotonic() + _ATTEMPT_SECONDS
        while True:
            snapshot = _attempt(conn, table_ids)
            if snapshot is not None:
                break
            if time.monotonic() > deadline:
                _logger.info("A slot exports the snapshot: its tables are written to all the time")
                return None
            time.sleep(_PAUSE_SECONDS)
        # After a crash of the server, WAL that was not flushed is gone, and its LSNs come again.
        advance_wal(current)
        if not _is_flushed(current, snapshot.consistent_point):
            _logger.info("A slot exports the snapshot: the WAL is not flushed")
            return None
    return snapshot


def _attempt(conn: Connection, table_ids: Collection[int]) -> ExportedSnapshot | None:
    with conn.cursor() as cursor:
        cursor.execute(
            _ATTEMPT.format(
                oids=",".join(map(str, sorted(table_ids))), is_writer_lock=IS_WRITER_LOCK
            )
        )
        row = cursor.fetchone()
        assert row is not None
        found = json.loads(row[0])
        if found["writers"] or not found["is_same"]:
            return None
        cursor.execute("select %s::timestamptz", (found["taken_at"],))
        clock = cursor.fetchone()
        assert clock is not None
    start, name = Lsn.parse(found["lsn"]), found["name"]
    timeline = found["timeline"]
    return ExportedSnapshot("", start, name, clock[0], frozenset(table_ids), timeline)


def _is_flushed(conn: Connection, lsn: Lsn) -> bool:
    deadline = time.monotonic() + _FLUSH_SECONDS
    while read_current_lsn(conn) <= lsn:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
