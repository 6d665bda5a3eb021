"""Positions in the WAL, and a heartbeat: a record of our own.

With `synchronous_commit = off` a commit is visible before its record is on the disk, and a
walsender reads only what is on the disk: the flushed position alone may leave out what a user has
just seen. `read_barrier` returns a position that everything committed by now lies before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pgcdc_assets.lsn import Lsn

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

PREFIX = "pgcdc"

CURRENT_LSN_SQL = (
    "case when pg_is_in_recovery() then pg_last_wal_replay_lsn()"
    " else pg_current_wal_flush_lsn() end"
)

# The insert position stands behind a page's header as soon as the page is begun, the flushed one
# only with its first record (SizeOfXLogLongPHD in xlog_internal.h).
_PAGE_HEADER_BYTES = 40

_POLL_SECONDS = 0.02


def read_barrier(conn: Connection, limit_seconds: float = 10.0) -> Lsn:
    """Wait until what is committed is flushed, and return the flushed position.

    The server's WAL writer flushes within three times `wal_writer_delay`, 0.6 s by default; after
    the limit the insert position is returned, and the caller's own waiting takes over.
    """
    inserted = _read_insert_lsn(conn)
    if inserted is None:
        return read_current_lsn(conn)
    deadline = time.monotonic() + limit_seconds
    while True:
        flushed = read_current_lsn(conn)
        if flushed + _PAGE_HEADER_BYTES >= inserted:
            return flushed
        if time.monotonic() > deadline:
            return inserted
        time.sleep(_POLL_SECONDS)


def _read_insert_lsn(conn: Connection) -> Lsn | None:
    """Where the next record goes; None on a standby, which writes none."""
    with conn.cursor() as cursor:
        cursor.execute(
            "select case when not pg_is_in_recovery() then pg_current_wal_insert_lsn() end::text"
        )
        row = cursor.fetchone()
    return None if row is None or row[0] is None else Lsn.parse(row[0])


def read_current_lsn(conn: Connection) -> Lsn:
    """Read how far the WAL is flushed; on a standby, how far it is replayed."""
    with conn.cursor() as cursor:
        cursor.execute(f"select ({CURRENT_LSN_SQL})::text")
        row = cursor.fetchone()
    assert row is not None
    return Lsn.parse(row[0])


def emit_heartbeat(conn: Connection) -> None:
    """Write an empty logical message in a transaction of its own.

    A message outside a transaction would not let a slot advance (PeerDB-io/peerdb#3904).
    Needs a primary, and no privilege.
    """
    with conn.cursor() as cursor:
        cursor.execute("select pg_logical_emit_message(true, %s, '')", (PREFIX,))
