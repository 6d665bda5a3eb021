"""A slot, a publication and a raw zone for captures from a test's database."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.tls_server import tls_fronts
from pgcdc_assets_tests.support.waits import wait_until

if TYPE_CHECKING:
    from pgcdc_assets.capture.cancellation import CancellationToken
    from pgcdc_assets.capture.session import CaptureSession
    from pgcdc_assets.capture.window import CaptureLimits, CaptureReport
    from pgcdc_assets.lsn import Lsn, LsnWindow
    from pgcdc_assets.postgres.connection import ConnectionSettings
    from pgcdc_assets.postgres.slots.status import SlotStatus
    from pgcdc_assets.raw.lake import Lake
    from pgcdc_assets.raw.zone import RawZone

NAME = "test"


@dataclass(frozen=True)
class Capturing:
    """One capture: `begin` creates the slot, `window` gives a window, `capture` lands it."""

    database: Database
    zone: RawZone
    slot: str
    conninfo: str
    publication: str = "pub"

    @property
    def settings(self) -> ConnectionSettings:
        from pgcdc_assets.postgres.connection import ConnectionSettings

        return ConnectionSettings(conninfo=self.conninfo, name=NAME)

    def windows_of(self, *statements: str) -> list[LsnWindow]:
        """Execute each statement in a window of its own, and return the windows."""
        from pgcdc_assets.lsn import LsnWindow

        start, windows = self.captured_through(), []
        for statement in statements:
            self.database.execute(statement)
            windows.append(LsnWindow.of(1, start, self.flush_lsn()))
            start = windows[-1].end
        return windows

    def sessions(self) -> list[tuple[int, str]]:
        """Return pid and application name of the connections of the capture."""
        found: list[Any] = self.database.query(
            "select pid, application_name from pg_stat_activity "
            f"where application_name like 'pgcdc % {NAME}' order by 2"
        )
        return found

    def of(self, database: Database) -> Capturing:
        """Return the capture of another database into the same raw zone."""
        slot = f"s_{database.name}"
        return replace(self, database=database, slot=slot, conninfo=database.conninfo)

    def through(self, conninfo: str) -> Capturing:
        """Return the same capture with another connection string."""
        return replace(self, conninfo=conninfo)

    def with_sender_timeout(self, seconds: float) -> Capturing:
        """Return the same capture with another wal_sender_timeout, in seconds."""
        option = f"-c wal_sender_timeout={int(seconds * 1000)}"
        return self.through(f"{self.conninfo} options='{option}'")

    def begin(self, *statements: str) -> Capturing:
        """Run the statements, publish all tables, and create slot and epoch."""
        from pgcdc_assets.postgres.slots.status import create_slot

        for statement in statements:
            self.database.execute(statement)
        self.database.execute(f"create publication {self.publication} for all tables")
        with create_slot(self.settings, self.slot) as snapshot:
            start = snapshot.consistent_point
        return self.record_epoch(start)

    def record_epoch(self, start: Lsn) -> Capturing:
        """Record the first epoch, of a slot that exists."""
        from pgcdc_assets.postgres.connection import query_connection
        from pgcdc_assets.postgres.slots.status import read_server_identity
        from pgcdc_assets_tests.support.raw.epochs import first_epoch

        with query_connection(self.settings, "test") as conn:
            identity = read_server_identity(conn)
        self.zone.epochs.append(first_epoch(identity, self.slot, self.publication, start))
        return self

    def flush_lsn(self) -> Lsn:
        """Return the flushed position of the WAL after a flush of all earlier commits."""
        from pgcdc_assets.lsn import Lsn

        # Test servers commit asynchronously. This commit also flushes earlier commits.
        self.database.transaction(
            "set local synchronous_commit = on", "create temporary table flushed ()"
        )
        return Lsn.parse(self.database.value("select pg_current_wal_flush_lsn()::text"))

    def captured_through(self) -> Lsn:
        epoch = self.zone.epochs.latest()
        assert epoch is not None
        return self.zone.changes.captured_through(epoch.epoch) or epoch.start_lsn

    def begin_with_one_insert(self) -> LsnWindow:
        """Begin with a table `t (id int)`, insert a row, and return the row's window."""
        self.begin("create table t (id int)")
        self.database.execute("insert into t values (1)")
        return self.window()

    def window(self, extra_bytes: int = 0) -> LsnWindow:
        """Return the next window, through all earlier commits and `extra_bytes` beyond."""
        from pgcdc_assets.lsn import LsnWindow

        return LsnWindow.of(1, self.captured_through(), self.flush_lsn() + extra_bytes)

    def capture(
        self, window: LsnWindow | None = None, limits: CaptureLimits | None = None
    ) -> CaptureReport:
        from pgcdc_assets.capture.window import capture_window

        return capture_window(
            self.settings,
            self.zone,
            self.slot,
            self.publication,
            self.window() if window is None else window,
            limits,
        )

    def capture_process(
        self,
        *windows: LsnWindow,
        failpoint: str = "",
        batch_bytes: int = 8 * 1024 * 1024,
        timeout: float = 120,
        streaming: str = "off",
        two_phase: bool = False,
        messages: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Capture by one session in a child process, which the failpoint kills."""
        keys = ",".join(window.key for window in windows)
        where = [self.conninfo, self.zone.lake.uri, self.slot, keys]
        chosen = {"two_phase": two_phase, "messages": messages}
        modes = ",".join(name for name, is_chosen in chosen.items() if is_chosen)
        program = "pgcdc_assets_tests.support.capture_process"
        return subprocess.run(
            [sys.executable, "-m", program, *where, str(batch_bytes), streaming, modes],
            env={**os.environ, "PGCDC_FAILPOINT": failpoint},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def session(
        self, limits: CaptureLimits | None = None, token: CancellationToken | None = None
    ) -> CaptureSession:
        """Return a session, which the caller enters."""
        from pgcdc_assets.capture.session import CaptureSession

        return CaptureSession(self.settings, self.zone, self.slot, self.publication, limits, token)

    @contextmanager
    def capture_aside(
        self, window: LsnWindow, limits: CaptureLimits | None = None
    ) -> Iterator[Outcome]:
        """Capture in a thread during the block. The outcome is complete after the block."""
        outcome = Outcome()

        def run() -> None:
            try:
                outcome.report = self.capture(window, limits)
            except Exception as error:
                outcome.error = error

        thread = Thread(target=run, daemon=True)
        thread.start()
        try:
            yield outcome
        except BaseException as error:
            thread.join(timeout=1)
            error.add_note(f"the concurrent capture: {outcome}")
            raise
        thread.join(timeout=60)
        assert not thread.is_alive(), "the capture does not end"

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the raw zone in stream order."""
        table = self.zone.changes.table.load()
        if table is None:
            return []
        rows: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
        return sorted(rows, key=lambda row: (row["epoch"], row["commit_lsn"], row["ordinal"]))

    def texts(self, table: str) -> list[Any]:
        """Return the new tuples of a table's rows, in order."""
        return [row["new"] for row in self.rows() if row["table"] == table]

    def status(self) -> SlotStatus:
        from pgcdc_assets.postgres.connection import query_connection
        from pgcdc_assets.postgres.slots.status import read_slot_status

        with query_connection(
            Capturing(self.database, self.zone, self.slot, self.database.conninfo).settings, "test"
        ) as conn:
            status = read_slot_status(conn, self.slot)
        assert status is not None
        return status

    def confirmed(self) -> Lsn:
        lsn = self.status().confirmed_flush_lsn
        assert lsn is not None
        return lsn

    def last_reply(self) -> float:
        """Return when the last status packet was sent that the walsender has read; 0 if none."""
        sent: float = self.database.value(
            "select coalesce(max(extract(epoch from r.reply_time)), 0)::float8 "
            "from pg_stat_replication r join pg_replication_slots s on s.active_pid = r.pid "
            "where s.slot_name = %s",
            (self.slot,),
        )
        return sent

    def wait_for_replies(self, seconds: float) -> None:
        """Wait until status packets have kept the walsender alive for this time from now on."""
        end = time.time() + seconds
        wait_until(lambda: self.last_reply() > end, "status packets to arrive for long enough")


@dataclass
class Outcome:
    """The outcome of a capture in a thread."""

    report: CaptureReport | None = None
    error: Exception | None = None


@pytest.fixture(params=["SocketWire", "TlsWire", "LibpqWire"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test with each transport.

    Embedded servers are built without SSL. A front encrypts the connections of `TlsWire`.
    """
    from pgcdc_assets.postgres.stream import start, tls_transport

    if request.param != "TlsWire":
        monkeypatch.setattr(start, "SocketWire", getattr(start, request.param))
        yield
        return
    with tls_fronts(request.getfixturevalue("certificates")):
        monkeypatch.setattr(start, "SocketWire", tls_transport.start_tls_wire)
        yield


@pytest.fixture
def capturing(database: Database, lake: Lake) -> Capturing:
    """Return a capture of a new database. `begin` creates slot, publication and epoch."""
    from pgcdc_assets.raw.zone import RawZone

    return Capturing(database, RawZone(lake, NAME), f"s_{database.name}", database.conninfo)
