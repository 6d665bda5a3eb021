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
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from pgcdc_assets import failpoints
from pgcdc_assets.capture.cancellation import CancellationToken, Overdue, Work
from pgcdc_assets.capture.heartbeats import Heartbeats
from pgcdc_assets.capture.landing import Landing, UndecodableRows
from pgcdc_assets.capture.limits import CaptureLimits, Outage
from pgcdc_assets.capture.meter import Phase
from pgcdc_assets.capture.prepared_archive import two_phase_options
from pgcdc_assets.capture.progress import Diagnostics, Report
from pgcdc_assets.capture.report import Attempt, CaptureReport
from pgcdc_assets.capture.schema_watch import SchemaWatch
from pgcdc_assets.capture.source_checks import (
    check_publication,
    check_raw_zone,
    check_server_timeline,
    check_slot,
    is_behind,
    keep_failover,
)
from pgcdc_assets.capture.source_stream import SourceStream
from pgcdc_assets.capture.stream_watch import build_watch
from pgcdc_assets.errors import (
    CaptureCancelled,
    ConnectionLost,
    PgcdcError,
    SlotBusy,
    TransientError,
)
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection, sorted_failures
from pgcdc_assets.postgres.encodings import TextNotConvertible
from pgcdc_assets.postgres.lease import Lease, capture_lease, wait_or_terminate_stale_walsender
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.plugin_options import Streaming
from pgcdc_assets.postgres.wal import read_current_lsn
from pgcdc_assets.protocol.open_transaction import UncertainMessages
from pgcdc_assets.raw.window_summary import WindowSummary
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
        self._settings = settings
        self._zone = zone
        self._slot = slot
        self._publication = publication
        self._limits = limits or CaptureLimits()
        self._diagnostics = Diagnostics(
            *(settings, slot, publication, self._limits.report_seconds, on_report),
            lambda: self._source,
        )
        self._heartbeats = Heartbeats(
            *(settings, zone, slot, self._limits, self._diagnostics.notify),
            lambda: None if self._source is None else self._source.position,
        )
        self._meter, deliver = self._diagnostics.meter, self._diagnostics.deliver
        self._work = Work(token or CancellationToken(), self._wake, self._release, deliver)
        self._held = ExitStack()
        self._lease: Lease | None = None
        self._source: SourceStream | None = None
        self._has_streamed = False
        self._whole_until = Lsn(0)  # A stream from below this LSN is started without streaming.
        self._as_stored = False  # The server has met a text that it cannot convert.
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
            self._end_stream()
            self._held.close()
        else:
            self._release()

    def land(self, window: LsnWindow) -> CaptureReport:
        """Land a window exactly once, and confirm its end to the slot.

        A landed window is verified, confirmed and reported with the same counts. Rows that cannot
        be decoded are read again over another connection, and then parked (see `protocol.parked`).

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
            TransientError: the connection or the lake failed. Nothing un-landed was confirmed; run
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
                reason="The capture took longer than its limit, and its landing does not return. "
                f"Check that the server and the lake {self._zone.uri} answer. Nothing un-landed "
                "was confirmed; run it again."
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

        def read() -> Lsn:
            return read_current_lsn(self._take_lease().conn)

        return self._work.call(lambda: self._resumed(read))

    def has_changes(self) -> bool:
        """Return whether changes have arrived behind the last window; True if this is unknown.

        Raises:
            CaptureCancelled: the token was cancelled.
        """

        def ask() -> bool:
            # The next landing raises the error of a stream that has ended.
            with suppress(PgcdcError):
                return self._source is None or self._source.has_changes()
            return True

        return self._work.call(ask)

    def finish(self) -> bool:
        """End the stream. Return whether the server has received all confirmations.

        A result of False means that the last confirmation may be lost; the next run repeats it.

        Raises:
            ConnectionLost: the connection was lost.
            CaptureCancelled: the token was cancelled.
        """
        return self._work.call(self._finish)

    def _finish(self) -> bool:
        source, self._source = self._source, None
        if source is None:
            return True
        try:
            return source.finish()
        finally:
            source.close()

    def _resumed(self, call: Callable[[], _Result]) -> _Result:
        """Call, and repeat the call after the loss of a connection."""
        self._outage = Outage(self._limits)
        while True:
            try:
                with sorted_failures(self._settings, "lease"):
                    return call()
            except (ConnectionLost, SlotBusy) as error:
                self._release()
                # The server may not have noticed yet that the lost connections have ended. Before
                # the first stream, another capture uses the slot.
                if not self._has_streamed or self._is_overdue():
                    raise
                self._work.pause(self._outage.next_pause(error))
            except TextNotConvertible:
                self._end_stream()
                self._as_stored = True

    def _land(self, attempt: Attempt) -> CaptureReport:
        window = attempt.window
        self._meter.enter(Phase.CONNECTING)
        conn = self._take_lease().conn
        captured_through = check_raw_zone(conn, self._zone, self._slot, window)
        if captured_through is None or window.end <= captured_through:
            attempt.summary = attempt.summary or self._zone.changes.summary(window)
            if captured_through is None or not self._needs_confirmation(conn, captured_through):
                return attempt.report()
        source = self._start(conn, window.epoch, captured_through)
        if attempt.summary is None:
            attempt.summary = self._land_rows(conn, source, attempt)
        self._confirm(window, max(window.end, captured_through))
        failpoints.reach(failpoints.AFTER_STATUS_PACKET)
        return attempt.report()

    def _land_rows(self, conn: Connection, source: SourceStream, attempt: Attempt) -> WindowSummary:
        try:
            return self._land_once(source, attempt, parks=False)
        except UncertainMessages:
            self._whole_until = attempt.window.end
            whole = self._start(conn, attempt.window.epoch, attempt.window.start)
            return self._land_rows(conn, whole, attempt)
        except UndecodableRows:
            # A connection may have altered the bytes: park rows that two connections bring.
            again = self._start(conn, attempt.window.epoch, attempt.window.start)
            return self._land_once(again, attempt, parks=True)

    def _land_once(self, source: SourceStream, attempt: Attempt, *, parks: bool) -> WindowSummary:
        lease, window = self._take_lease(), attempt.window
        schema = SchemaWatch(self._zone, self._publication, window.epoch, settings=self._settings)
        landing = Landing(
            *(self._zone, window, source, lease, self._settings, schema, self._work, self._meter),
            self._end,
            parks,
            self._heartbeats.facts,
            self._limits.malformed_folder,
        )
        try:
            summary = landing.run()
            self._end = None
            landing.finish()
        except BaseException:
            self._end_stream()
            raise
        self._meter.add(windows=1)
        attempt.is_landed_here = True
        attempt.bytes_received = landing.bytes_decoded
        attempt.warnings = source.warnings() + Counter(schema.warnings)
        return summary

    def _needs_confirmation(self, conn: Connection, captured_through: Lsn) -> bool:
        """Return whether the server may not have received the end of the landed windows."""
        return self._source is None and is_behind(conn, self._slot, captured_through)

    def _take_lease(self) -> Lease:
        """Return the held lease; connect and take the lease if the session does not hold it."""
        if self._lease is None:
            conn = self._held.enter_context(query_connection(self._settings, "lease"))
            self._lease = self._held.enter_context(capture_lease(conn, self._zone.name, self._slot))
        return self._lease

    def _start(self, conn: Connection, epoch: int, captured_through: Lsn) -> SourceStream:
        """Return the stream at the end of the raw zone; start a stream if none is there."""
        if self._source is not None and self._source.position == captured_through:
            check_publication(conn, self._zone, self._publication)
            return self._source
        self._end_stream()
        ours = self._settings.application_name("capture")
        wait_or_terminate_stale_walsender(conn, self._slot, self._limits.slot_wait_seconds, ours)
        self._heartbeats.check(conn, epoch)  # Another owner explains a slot that has advanced.
        status = check_slot(conn, self._zone, self._slot, captured_through)
        if self._limits.failover:
            keep_failover(conn, self._settings, self._slot)
        check_publication(conn, self._zone, self._publication)
        limits = self._limits.stream
        options = two_phase_options(conn, self._zone, epoch, status, limits.plugin)
        if captured_through < self._whole_until:
            options = replace(options, streaming=Streaming.OFF)
        stream = ReplicationStream(
            *(self._settings, self._slot, self._publication, captured_through),
            replace(limits, plugin=options, as_stored=self._as_stored),
            build_watch(conn, self._is_overdue, self._limits.total_seconds),
            lambda server: check_server_timeline(self._zone, server),
        )
        try:
            stream.__enter__()
            check_slot(conn, self._zone, self._slot, captured_through, stream.backend_pid)
        except BaseException:
            stream.close()
            raise
        self._source = SourceStream(
            stream, self._settings, conn, self._zone, self._publication, captured_through, epoch
        )
        self._has_streamed = True
        self._diagnostics.begin(conn)
        self._heartbeats.begin(conn, epoch, captured_through, stream.is_standby)
        self._outage.end()
        # `_wake` does not know a stream that starts after it.
        self._work.check()
        return self._source

    def _confirm(self, window: LsnWindow, end: Lsn) -> None:
        """Confirm the end of the landed windows to the slot."""
        assert self._source is not None
        try:
            self._source.stream.confirm(end)
        except PgcdcError as error:
            # The stream ended during the commit of the window.
            self._end_stream()
            if isinstance(error, _RESUMED) or not isinstance(error, TransientError):
                raise
            raise TransientError(
                reason=f"Window {window.key} is landed, but its end is not confirmed yet. The next "
                f"run confirms the end and continues. {error}"
            ) from error

    def _is_overdue(self) -> bool:
        """Return whether the window in progress has reached the time limit."""
        return self._end is not None and time.monotonic() > self._end

    def _wake(self) -> None:
        """End the abandoned thread's wait for a batch."""
        source = self._source
        if source is not None:
            source.stream.cancel(CaptureCancelled())

    def _end_stream(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _release(self) -> None:
        """Close both connections at once, which releases slot and lease."""
        self._end_stream()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.conn.close()  # The server releases the lease, without a wait for a reply.
        held, self._held = self._held, ExitStack()
        held.close()
