"""The lease of a slot, which allows one capture at a time to use the slot.

The lease is a session-level advisory lock in the source database (Postgres documentation, 13.3.5
Advisory Locks), so the server releases the lease when its holder dies. A walsender of the package
that holds the slot while this process holds the lease belongs to a dead capture and may be ended.
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
from pgcdc_assets.postgres.slots.status import read_slot_status

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# "pgcd": the first key of the lock, different from the keys of the application's advisory locks.
_LOCK_CLASS = 0x70676364
_POLL_SECONDS = 0.05
_TERMINATION_MS = 10_000
# A new run may start before the server notices that the previous process was killed.
_LEASE_SECONDS = 1.0

_HOLDER = """
select l.pid, coalesce(a.application_name, 'another role')
  from pg_locks l
  left join pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'advisory' and l.granted and l.objsubid = 2
   and l.database = (select oid from pg_database where datname = current_database())
   and l.classid::bigint = %s and l.objid::bigint = %s
"""

# The statement compares the pid again, because another process may have acquired the slot since the
# status was read.
_TERMINATE = """
select pg_terminate_backend(active_pid, %s)
  from pg_replication_slots
 where slot_name = %s and active_pid = %s
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """A held lease.

    Attributes:
        conn: the session that holds the lock.
        name: the capture's name.
        slot: the slot's name.
    """

    conn: Connection
    name: str
    slot: str

    def verify(self) -> None:
        """Check that the session still holds the lock. Call `verify` before a landing commits.

        Raises:
            ConnectionLost: the session has ended, and another process may hold the lease.
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
            reason="the session of the lease has ended, so this landing is discarded",
        )


@contextlib.contextmanager
def capture_lease(conn: Connection, name: str, slot: str) -> Iterator[Lease]:
    """Hold the lease of a slot inside the block. Keep `conn` open for the whole block.

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
        # The server has released the locks of an ended session.
        with contextlib.suppress(psycopg2.Error), conn.cursor() as cursor:
            cursor.execute("select pg_advisory_unlock(%s, %s)", (_LOCK_CLASS, signed_key))


def _try_lock(conn: Connection, slot: str, signed_key: int) -> tuple[int, str] | None:
    """Take the lock and return None, or return pid and application name of the lock's holder."""
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
    """Wait until no walsender reads the slot; then end a stale walsender. Hold the lease before.

    The walsender of a dead capture ends by itself within `wal_sender_timeout`. This function waits
    for `wait_seconds`, then ends the walsender.

    Args:
        conn: a connection to the source database.
        slot: the slot's name.
        wait_seconds: time to wait before the walsender is ended.
        application_name: prefix of the application names of the package's walsenders.

    Returns:
        The pid of the walsender that was ended, or None.

    Raises:
        SlotBusy: another program's process reads the slot, or the stale walsender does not end.
        ConfigurationError: the privilege to end the walsender is missing.
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
            "another role. End the process with: select "
            f"pg_terminate_backend({status.active_pid}), or grant pg_signal_backend to the role of "
            "the capture."
        ) from error
    if row is not None and not row[0]:
        raise busy
    return status.active_pid


def _lock_key(slot: str) -> int:
    return zlib.crc32(slot.encode())
