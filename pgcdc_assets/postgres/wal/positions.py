"""WAL positions, and the heartbeat record.

With `synchronous_commit = off`, a commit is visible before its WAL record is flushed, and a
walsender sends flushed WAL only. The flushed position may therefore be below a visible commit.
`read_barrier` returns a position above every commit that is visible at the time of the call.

Source: Postgres documentation, 9.28.3 Backup Control Functions and 28.4 Asynchronous Commit.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING

import psycopg2

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.empty_batches import HEARTBEAT_PREFIX

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

PREFIX = HEARTBEAT_PREFIX

CURRENT_LSN_SQL = (
    "case when pg_is_in_recovery() then pg_last_wal_replay_lsn()"
    " else pg_current_wal_flush_lsn() end"
)

# NULL on a standby, whose control file shows the timeline of its last checkpoint.
PRIMARY_TIMELINE_SQL = (
    "case when not pg_is_in_recovery()"
    " then ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int end"
)

# At a page boundary the insert position includes the new page's header, and the flushed position
# does not (SizeOfXLogLongPHD in src/include/access/xlog_internal.h).
_PAGE_HEADER_BYTES = 40

_POLL_SECONDS = 0.02

# Longer than the WAL writer needs for an asynchronous commit, with the default settings.
_WRITER_SECONDS = 0.7


def read_clock(conn: Connection) -> dt.datetime:
    """Return the time by the server's clock."""
    with conn.cursor() as cursor:
        cursor.execute("select clock_timestamp()")
        ((now,),) = cursor.fetchall()
    assert isinstance(now, dt.datetime)
    return now


def read_barrier(conn: Connection, limit_seconds: float = 10.0) -> Lsn:
    """Wait until all visible commits are flushed, and return the flushed position.

    The WAL writer flushes within three times `wal_writer_delay`, 0.6 s by default. It leaves the
    last page of WAL that a transaction wrote which is open, so a commit follows if necessary. After
    `limit_seconds` return the insert position: the caller waits until the stream reaches it.
    """
    inserted = _read_insert_lsn(conn)
    if inserted is None:
        return read_current_lsn(conn)
    began = time.monotonic()
    has_committed = False
    while True:
        flushed = read_current_lsn(conn)
        seconds = time.monotonic() - began
        if flushed + _PAGE_HEADER_BYTES >= inserted:
            return flushed
        if seconds > limit_seconds:
            return inserted
        if seconds > _WRITER_SECONDS and not has_committed:
            has_committed = True
            advance_wal(conn)
        time.sleep(_POLL_SECONDS)


def _read_insert_lsn(conn: Connection) -> Lsn | None:
    """Return the position of the next WAL record; None on a standby, which writes no WAL."""
    with conn.cursor() as cursor:
        cursor.execute(
            "select case when not pg_is_in_recovery() then pg_current_wal_insert_lsn() end::text"
        )
        row = cursor.fetchone()
    return None if row is None or row[0] is None else Lsn.parse(row[0])


def read_current_lsn(conn: Connection) -> Lsn:
    """Return the flushed position of a primary, or the replayed position of a standby."""
    with conn.cursor() as cursor:
        cursor.execute(f"select ({CURRENT_LSN_SQL})::text")
        row = cursor.fetchone()
    assert row is not None
    return Lsn.parse(row[0])


def read_written_lsn(conn: Connection) -> Lsn:
    """Return the end of the written WAL, flushed or not; of a standby, the replayed position.

    No process has seen a later position before this call.
    """
    return _read_insert_lsn(conn) or read_current_lsn(conn)


def advance_wal(conn: Connection) -> None:
    """Commit a transaction without changes: its commit record is behind all records before it.

    The server must be a primary. The commit is asynchronous; a publication sends nothing of it.
    """
    with conn.cursor() as cursor:
        cursor.execute("select pg_current_xact_id()")


def emit_heartbeat(conn: Connection) -> None:
    """Write an empty logical message in a transaction of its own.

    A slot does not advance over a non-transactional message (PeerDB-io/peerdb#3904). The server
    must be a primary. The call needs no privilege.

    Raises:
        TransientError: the server has refused the message, as a server in recovery does.
        psycopg2.Error: the connection was lost.
    """
    with conn.cursor() as cursor:
        try:
            cursor.execute("select pg_logical_emit_message(true, %s, '')", (PREFIX,))
        except psycopg2.Error as error:
            if conn.closed:
                raise
            what = error.diag.message_primary or str(error)
            raise TransientError(reason=f"No heartbeat was written: {what}.") from error
