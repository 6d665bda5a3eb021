"""The heartbeats of a session in its source.

A heartbeat is a commit in the capture's own database. Its time shows how fresh the raw zone is,
also of a publication without changes, beside busy databases. A thread of its own writes the
heartbeats over short connections, so that a landing in progress delays none. A heartbeat that fails
is reported once, and does not end the capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pgcdc_assets.capture.captured_slot import CapturedSlot
from pgcdc_assets.capture.slot_owner import (
    check_owner,
    check_restore,
    read_row,
    record_owner,
    sync_remedy,
)
from pgcdc_assets.errors import ConfigurationError, PgcdcError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.heartbeat import Heartbeat, SlotOwner, write_heartbeat
from pgcdc_assets.postgres.slots.status import read_slot_status
from pgcdc_assets.postgres.wal.positions import emit_heartbeat

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

_STANDBY = "The source is a standby: no heartbeats are written. Remove the setting `heartbeat`."


class Heartbeats:
    """The heartbeats of one session.

    Args:
        captured: the slot and the raw zone.
        notify: function that reports a problem.
        position: function that returns the end of the captured WAL.
    """

    def __init__(
        self,
        captured: CapturedSlot,
        notify: Callable[[str], None],
        position: Callable[[], Lsn | None],
    ) -> None:
        self._settings = captured.settings
        self._zone = captured.zone
        self._slot = captured.slot
        self._policy = captured.limits.heartbeat
        self._adopts = captured.limits.adopt_slot
        self._notify = notify
        self._position = position
        self._owner: SlotOwner | None = None
        self._problem = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        # Heartbeats behind the landed windows, oldest first.
        self._written: list[Heartbeat] = []
        # The number of the newest heartbeat: a row that was deleted is written with a higher one.
        self._number = 0
        self._lock = threading.Lock()

    def check(self, conn: Connection, epoch: int) -> None:
        """Check the newest heartbeat of the slot before a stream starts.

        Raises:
            SlotTaken: the slot belongs to another capture or lake.
            RawZoneError: the source was restored, and lacks captured changes.
        """
        status = None if self._policy is None else read_slot_status(conn, self._slot)
        row = read_row(conn, self._policy, status)
        if not self._adopts and status is not None:
            check_owner(row, status, self._zone, sync_remedy(self._zone.name))
        check_restore(row, self._zone, epoch)

    def begin(self, conn: Connection, epoch: int, captured_through: Lsn, is_standby: bool) -> None:
        """Write the owner of the slot, and start the thread if none is alive.

        Args:
            conn: the connection of the lease.
            epoch: the session's epoch.
            captured_through: end of the captured WAL.
            is_standby: the server is a standby, which cannot be written.
        """
        policy = self._policy
        if policy is None or self._ended.is_set():
            return
        if is_standby:
            self._report(_STANDBY)
            return
        if policy.table is not None:
            zone, slot = self._zone, self._slot
            try:
                self._keep(record_owner(conn, zone, policy, slot, epoch, captured_through))
            except PgcdcError as error:
                self._report(str(error))
            path = zone.lake.path(zone.name)
            self._owner = SlotOwner(slot, zone.name, path, zone.epochs.create_id(), epoch)
        if self._thread is None or not self._thread.is_alive():
            name = f"heartbeat {self._slot}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """End the thread. The call does not wait for a heartbeat in progress."""
        self._ended.set()

    def facts(self, window: LsnWindow) -> Mapping[str, int]:
        """Return the newest heartbeat before a window's end, as an application transaction.

        A landing that fails is repeated, so the heartbeats stay until the next window.
        """
        with self._lock:
            self._written = [each for each in self._written if each.flushed >= window.start]
            inside = sorted(
                (each for each in self._written if each.flushed <= window.end),
                key=lambda each: each.number,
            )
        changes = self._zone.changes
        return {
            changes.heartbeat_app_id(window.epoch, each.table_id): each.number for each in inside
        }

    def _keep(self, written: Heartbeat | None) -> None:
        if written is not None:
            with self._lock:
                self._written.append(written)
                self._number = max(self._number, written.number)

    def _run(self) -> None:
        policy = self._policy
        assert policy is not None
        while not self._ended.wait(policy.seconds):
            try:
                self._beat()
                self._problem = ""
            except PgcdcError as error:
                self._report(str(error))

    def _beat(self) -> None:
        policy, owner, position = self._policy, self._owner, self._position()
        assert policy is not None
        with query_connection(self._settings, "heartbeat", statement_timeout_ms=5000) as conn:
            table = policy.table_name
            if table is None:
                emit_heartbeat(conn)
            elif owner is not None and position is not None:
                written = write_heartbeat(conn, table, owner, position, self._number)
                if written is None and not self._ended.is_set():
                    raise ConfigurationError(
                        reason=f"No heartbeat was written to table {table}: another lake has taken "
                        f"over slot {self._slot}."
                    )
                self._keep(written)

    def _report(self, problem: str) -> None:
        """Report a problem that is not the last one."""
        if problem != self._problem:
            self._problem = problem
            self._notify(problem)
