"""One runner per slot: the lease that two captures of one publication compete for.

The lease is a session advisory lock in the source database, so the server itself frees it when the
holder dies. It says which of two runners may use the slot; a walsender that still holds the slot
while we hold the lease is therefore left over from a dead runner of ours, and may be ended.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2

from pgcdc_assets.errors import ConfigurationError, ConnectionLost, SlotBusy
from pgcdc_assets.postgres.slots import read_slot_status

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# "pgcd": keeps our locks apart from the application's own advisory locks.
_LOCK_CLASS = 0x70676364
_POLL_SECONDS = 0.05
_TERMINATION_MS = 10_000
# The server notices within moments that a process was killed, and a new run may be as fast.
_LEASE_SECONDS = 1.0

_HOLDER = """
select l.pid, coalesce(a.application_name, 'another role')
  from pg_locks l
  left join pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'advisory' and l.granted and l.objsubid = 2
   and l.database = (select oid from pg_database where datname = current_database())
   and l.classid::bigint = %s and l.objid::bigint = %s
"""

# The pid is compared once more: between our look and this statement the slot may have changed
# hands.
_TERMINATE = """
select pg_terminate_backend(active_pid, %s)
  from pg_replication_slots
 where slot_name = %s and active_pid = %s
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """A held lease; `verify` says whether it still is."""

    conn: Connection
    name: str
    slot: str

    def verify(self) -> None:
        """Check that the session which holds the lock lives; to be called before a landing commits.

        Raises:
            ConnectionLost: the session is gone, and somebody else may own the slot by now.
        """
        try:
            with self.conn.cursor() as cursor:
                cursor.execute(_HOLDER, (_LOCK_CLASS, _lock_key(self.slot)))
                held = cursor.fetchone()
        except psycopg2.Error as error:
            raise self._lost() from error
        if held is None or held[0] != self.conn.info.backend_pid:
            raise self._lost()

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(
            server=f"database {self.conn.info.dbname}",
            doing=f"holding the lease of slot {self.slot} for {self.name}",
            reason="the session that held it has ended, so this landing is discarded",
        )


@contextlib.contextmanager
def capture_lease(conn: Connection, name: str, slot: str) -> Iterator[Lease]:
    """Hold the right to use a slot inside the block; `conn` must stay open for as long.

    Raises:
        SlotBusy: another session holds the lease.
    """
    signed_key = struct.unpack("!i", struct.pack("!I", _lock_key(slot)))[0]
    deadline = time.monotonic() + _LEASE_SECONDS
    pause = threading.Event()
    while (holder := _try_lock(conn, slot, signed_key)) is not None:
        pid, application_name = holder
        if time.monotonic() >= deadline:
            raise SlotBusy(slot=slot, active_pid=pid, application_name=application_name)
        pause.wait(_POLL_SECONDS)
    try:
        yield Lease(conn, name, slot)
    finally:
        # A session that is gone has freed its locks already.
        with contextlib.suppress(psycopg2.Error), conn.cursor() as cursor:
            cursor.execute("select pg_advisory_unlock(%s, %s)", (_LOCK_CLASS, signed_key))


def _try_lock(conn: Connection, slot: str, signed_key: int) -> tuple[int, str] | None:
    """Take the lock; else name the process that holds it."""
    with conn.cursor() as cursor:
        cursor.execute("select pg_try_advisory_lock(%s, %s)", (_LOCK_CLASS, signed_key))
        row = cursor.fetchone()
        if row is not None and row[0]:
            return None
        cursor.execute(_HOLDER, (_LOCK_CLASS, _lock_key(slot)))
        pid, application_name = cursor.fetchone() or (0, "ended just now")
        return pid, application_name


def wait_or_terminate_stale_walsender(
    conn: Connection, slot: str, wait_seconds: float, application_name: str = "pgcdc capture"
) -> int | None:
    """Make the slot free, given that the caller holds its lease.

    A walsender of a dead runner notices by itself within `wal_sender_timeout`; we wait a while,
    then end it.

    Args:
        application_name: how our walsenders are named; a longer name that begins so is ours too.

    Returns:
        The pid of the walsender that was ended, or None when nothing had to be ended.

    Raises:
        SlotBusy: a process that is not ours holds the slot, or ours does not end.
    """
    deadline = time.monotonic() + wait_seconds
    pause = threading.Event()
    while True:
        status = read_slot_status(conn, slot)
        if status is None or status.active_pid is None:
            return None
        holder = status.active_application_name or ""
        busy = SlotBusy(slot=slot, active_pid=status.active_pid, application_name=holder)
        if not holder.startswith(application_name):
            raise busy
        if time.monotonic() >= deadline:
            break
        pause.wait(_POLL_SECONDS)
    try:
        with conn.cursor() as cursor:
            cursor.execute(_TERMINATE, (_TERMINATION_MS, slot, status.active_pid))
            row = cursor.fetchone()
    except psycopg2.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            reason=f"Replication slot {slot} is held by the stale process {status.active_pid} of "
            f"another role. "
            f"End it with: select pg_terminate_backend({status.active_pid}), or grant "
            f"pg_signal_backend."
        ) from error
    if row is not None and not row[0]:
        raise busy
    return status.active_pid


def _lock_key(slot: str) -> int:
    return zlib.crc32(slot.encode())
