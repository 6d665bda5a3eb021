"""A capture session: one lease and one stream, which land window after window.

The order of the steps prevents loss and duplication. Once per session, and again after the loss of
a connection:

1. Take the lease, which excludes other captures of the slot.
2. Start the stream at the end of the raw zone, then check the slot while the session's walsender
   holds the slot: START_REPLICATION skips silently to `confirmed_flush_lsn`
   (src/backend/replication/logical/logical.c, CreateDecodingContext).

For each window:

3. Land the window's rows in one durable commit. Directly before the commit, verify the lease.
4. Confirm the window's end to the server. No other step confirms an LSN.
5. Keep the messages that have arrived behind the window's end: they begin the next window.

If the process dies between two steps, the next run either finds the window landed and confirms its
end, or finds nothing of the window and reads the window again. Any error between two steps ends the
stream and discards the messages in hand, so a window never begins in the middle of a stream whose
earlier part was not landed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from pgcdc_assets import failpoints
from pgcdc_assets.capture.cancellation import CancellationToken, Overdue, Work
from pgcdc_assets.capture.captured_slot import CapturedSlot
from pgcdc_assets.capture.connections import SessionConnections
from pgcdc_assets.capture.heartbeats import Heartbeats
from pgcdc_assets.capture.landing import Landing, UndecodableRows
from pgcdc_assets.capture.limits import CaptureLimits, Outage
from pgcdc_assets.capture.meter import Phase
from pgcdc_assets.capture.progress import Diagnostics, Report
from pgcdc_assets.capture.report import Attempt, CaptureReport
from pgcdc_assets.capture.schema_watch import SchemaWatch
from pgcdc_assets.capture.source_checks import (
    check_raw_zone,
    is_behind,
)
from pgcdc_assets.capture.source_stream import SourceStream
from pgcdc_assets.errors import (
    CaptureCancelled,
    ConnectionLost,
    PgcdcError,
    SlotBusy,
    TransientError,
)
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings, sorted_failures
from pgcdc_assets.postgres.encodings import TextNotConvertible
from pgcdc_assets.postgres.wal.positions import read_current_lsn, read_written_lsn
from pgcdc_assets.protocol.open_transaction import UncertainMessages
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

_Result = TypeVar("_Result")

# Errors after which a session starts another stream.
_RESUMED = (ConnectionLost, TextNotConvertible)


class CaptureSession:
    """The landing of windows by one stream, a context manager. One thread uses a session.

    The source has two connections of a session: the stream, and one for the lease and the catalog.
    Both open at the first call. A lost connection is resumed from the last landed window within
    `limits.resume_seconds`.

    Args:
        settings: the source database.
        zone: the raw zone.
        slot: the slot's name.
        publication: the publication's name.
        limits: time limits and sizes.
        token: cancels the session from another thread.
        on_report: function that receives the reports about the capture, in the caller's thread.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        zone: RawZone,
        slot: str,
        publication: str,
        limits: CaptureLimits | None = None,
        token: CancellationToken | None = None,
        on_report: Callable[[Report], None] | None = None,
    ) -> None:
        self._limits = limits or CaptureLimits()
        self._captured = CapturedSlot(settings, zone, slot, publication, self._limits)
        self._diagnostics = Diagnostics(
            self._captured, on_report, source=lambda: self._connections.source
        )
        self._heartbeats = Heartbeats(
            self._captured, self._diagnostics.notify, position=self._read_position
        )
        self._connections = SessionConnections(
            self._captured, self._diagnostics, self._heartbeats, self._is_overdue
        )
        self._meter = self._diagnostics.meter
        self._work = Work(
            token or CancellationToken(),
            self._wake,
            self._connections.release,
            self._diagnostics.deliver,
        )
        self._outage = Outage(self._limits)
        # The end of the time limit of the window in progress, by the monotonic clock.
        self._end: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._diagnostics.end()
        self._heartbeats.end()
        # The thread of an abandoned call releases the connections.
        if self._work.is_left:
            return
        if error is None:
            self._connections.close()
        else:
            self._connections.release()

    def land(self, window: LsnWindow) -> CaptureReport:
        """Land a window exactly once, and confirm its end to the slot.

        A landed window is verified, confirmed and reported with the same counts. Rows that cannot
        be decoded are read again over another connection, and then parked (see
        `protocol.parked_rows`).

        Raises:
            ConfigurationError: the settings do not lead to a usable connection and slot.
            SlotBusy: another capture holds the lease, or another program reads the slot.
            SlotMissing, SlotLost, SlotAdvanced: the slot cannot send the next changes of the raw
                zone.
            WindowUnavailable: the window was landed, but rows are missing.
            RawZoneError: the window does not follow the landed windows, or the raw zone was filled
                from another slot.
            ProtocolError: the stream contains a malformed message.
            CaptureCancelled: the token was cancelled.
            TransientError: the connection or the lake failed. No change is lost; run
                it again.
        """
        limit = self._limits.total_seconds
        attempt, before = Attempt(window), self._meter.read()
        self._end = None if limit is None else attempt.began + limit
        # The stream ends at the limit, which ends a landing that does not hang.
        seconds = None if limit is None else limit + self._limits.stream.end_seconds
        try:
            report = self._work.call(lambda: self._resumed(lambda: self._land(attempt)), seconds)
            return replace(report, phase_seconds=self._meter.read().since(before).seconds)
        except Overdue:
            raise TransientError(
                reason="The capture took longer than its limit (stream.total_seconds), and its "
                "landing does not return. Check that the server and the lake "
                f"{self._captured.zone.uri} answer. No change is lost; run it again."
            ) from None
        finally:
            self._end = None
            self._meter.enter(Phase.IDLE)

    def read_current_lsn(self) -> Lsn:
        """Return the end of the server's WAL, which the session's next window may have as its end.

        Raises:
            SlotBusy: another capture holds the lease.
            ConnectionLost: the server is down, or went away.
            CaptureCancelled: the token was cancelled.
        """
        return self._read(read_current_lsn)

    def read_written_lsn(self) -> Lsn:
        """Return the end of the server's WAL, flushed or not. For errors see `read_current_lsn`."""
        return self._read(read_written_lsn)

    def has_changes(self) -> bool:
        """Return whether changes have arrived behind the last window; True if this is unknown.

        Raises:
            CaptureCancelled: the token was cancelled.
        """

        def ask() -> bool:
            # The next landing raises the error of a stream that has ended.
            with suppress(PgcdcError):
                source = self._connections.source
                return source is None or source.has_changes()
            return True

        return self._work.call(ask)

    def finish(self) -> bool:
        """End the stream. Return whether the server has received all confirmations.

        A result of False means that the last confirmation may be lost; the next run repeats it.

        Raises:
            ConnectionLost: the connection was lost.
            CaptureCancelled: the token was cancelled.
        """
        return self._work.call(self._connections.finish)

    def _read(self, read: Callable[[Connection], Lsn]) -> Lsn:
        """Read an LSN over the connection of the lease."""
        return self._work.call(
            lambda: self._resumed(lambda: read(self._connections.take_lease().conn))
        )

    def _resumed(self, call: Callable[[], _Result]) -> _Result:
        """Call, and repeat the call after the loss of a connection."""
        self._outage = Outage(self._limits)
        while True:
            try:
                with sorted_failures(self._captured.settings, "lease"):
                    return call()
            except (ConnectionLost, SlotBusy) as error:
                self._connections.release()
                # The server may not have noticed yet that the lost connections have ended. Before
                # the first stream, another capture uses the slot.
                if not self._connections.has_streamed or self._is_overdue():
                    raise
                self._work.pause(self._outage.next_pause(error))
            except TextNotConvertible:
                self._connections.end_stream()
                self._connections.read_as_stored()

    def _land(self, attempt: Attempt) -> CaptureReport:
        window, zone = attempt.window, self._captured.zone
        self._meter.enter(Phase.CONNECTING)
        conn = self._connections.take_lease().conn
        captured_through = check_raw_zone(conn, zone, self._captured.slot, window)
        if captured_through is None or window.end <= captured_through:
            attempt.summary = attempt.summary or zone.changes.summary(window)
            if captured_through is None or not self._needs_confirmation(conn, captured_through):
                return attempt.report()
        source = self._start(window.epoch, captured_through)
        if attempt.summary is None:
            attempt.summary = self._land_rows(source, attempt)
        self._confirm(window, max(window.end, captured_through))
        failpoints.reach(failpoints.AFTER_STATUS_PACKET)
        return attempt.report()

    def _land_rows(self, source: SourceStream, attempt: Attempt) -> WindowSummary:
        window, parks = attempt.window, False
        # Each of the two errors is raised once at most.
        while True:
            try:
                return self._land_once(source, attempt, parks=parks)
            except UncertainMessages:
                self._connections.read_whole_until(window.end)
            except UndecodableRows:
                # A connection may have altered the bytes: park rows that two connections bring.
                parks = True
            source = self._start(window.epoch, window.start)

    def _land_once(self, source: SourceStream, attempt: Attempt, *, parks: bool) -> WindowSummary:
        window, captured = attempt.window, self._captured
        schema = SchemaWatch(
            captured.zone, captured.publication, window.epoch, settings=captured.settings
        )
        landing = Landing(
            captured,
            window,
            source,
            self._connections.take_lease(),
            schema,
            self._work,
            self._meter,
            end=self._end,
            parks=parks,
            facts=self._heartbeats.facts,
        )
        try:
            summary = landing.run()
            self._end = None
            landing.finish()
        except BaseException:
            self._connections.end_stream()
            raise
        self._meter.add(windows=1)
        attempt.is_landed_here = True
        attempt.bytes_received = landing.bytes_decoded
        attempt.warnings = source.warnings() + Counter(schema.warnings)
        return summary

    def _needs_confirmation(self, conn: Connection, captured_through: Lsn) -> bool:
        """Return whether the server may not have received the end of the landed windows."""
        is_streaming = self._connections.source is not None
        return not is_streaming and is_behind(conn, self._captured.slot, captured_through)

    def _start(self, epoch: int, captured_through: Lsn) -> SourceStream:
        """Return the stream at the end of the raw zone; start a stream if none is there."""
        source = self._connections.start(epoch, captured_through)
        self._outage.end()
        # `_wake` does not know a stream that starts after it.
        self._work.check()
        return source

    def _confirm(self, window: LsnWindow, end: Lsn) -> None:
        """Confirm the end of the landed windows to the slot."""
        source = self._connections.source
        assert source is not None
        try:
            source.stream.confirm(end)
        except PgcdcError as error:
            # The stream ended during the commit of the window.
            self._connections.end_stream()
            if isinstance(error, _RESUMED) or not isinstance(error, TransientError):
                raise
            raise TransientError(
                reason=f"Window {window.key} is landed, but its end is not confirmed yet. The next "
                f"run confirms the end and continues. {error}"
            ) from error

    def _is_overdue(self) -> bool:
        """Return whether the window in progress has reached the time limit."""
        return self._end is not None and time.monotonic() > self._end

    def _read_position(self) -> Lsn | None:
        """Return the end of the captured WAL; None without a stream."""
        source = self._connections.source
        return None if source is None else source.position

    def _wake(self) -> None:
        """End the abandoned thread's wait for a batch."""
        source = self._connections.source
        if source is not None:
            source.stream.cancel(CaptureCancelled())
