"""The two connections of a session: the lease with the catalog, and the stream.

The order of their start prevents loss: take the lease, start the stream at the end of the raw zone,
then check the slot while the session's walsender holds the slot. START_REPLICATION skips silently
to `confirmed_flush_lsn` (src/backend/replication/logical/logical.c, CreateDecodingContext).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from pgcdc_assets.capture.captured_slot import CapturedSlot
from pgcdc_assets.capture.heartbeats import Heartbeats
from pgcdc_assets.capture.prepared_archive import two_phase_options
from pgcdc_assets.capture.progress import Diagnostics
from pgcdc_assets.capture.source_checks import (
    check_publication,
    check_server_timeline,
    check_slot,
    keep_failover,
)
from pgcdc_assets.capture.source_stream import SourceStream
from pgcdc_assets.capture.stream_watch import build_watch
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.slots.lease import (
    Lease,
    capture_lease,
    wait_or_terminate_stale_walsender,
)
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection


class SessionConnections:
    """The lease and the stream of one session.

    Args:
        captured: the slot and the raw zone.
        diagnostics: begin with the first stream.
        heartbeats: begin with the first stream.
        is_overdue: whether the window in progress has reached its time limit.

    Attributes:
        source: the stream; None before its start and after its end.
        has_streamed: a stream of the session has started.
    """

    def __init__(
        self,
        captured: CapturedSlot,
        diagnostics: Diagnostics,
        heartbeats: Heartbeats,
        is_overdue: Callable[[], bool],
    ) -> None:
        self._captured = captured
        self._diagnostics = diagnostics
        self._heartbeats = heartbeats
        self._is_overdue = is_overdue
        self._held = ExitStack()
        self._lease: Lease | None = None
        self.source: SourceStream | None = None
        self.has_streamed = False
        self._whole_until = Lsn(0)
        self._as_stored = False
        self._notice = ""

    def take_lease(self) -> Lease:
        """Return the held lease; connect and take the lease if the session does not hold it.

        Raises:
            SlotBusy: another capture holds the lease.
            ConnectionLost: the server is down, or went away.
        """
        if self._lease is None:
            captured = self._captured
            conn = self._held.enter_context(query_connection(captured.settings, "lease"))
            lease = capture_lease(conn, captured.zone.name, captured.slot)
            self._lease = self._held.enter_context(lease)
        return self._lease

    def read_whole_until(self, lsn: Lsn) -> None:
        """Start the streams from below this LSN without streaming of open transactions."""
        self._whole_until = lsn

    def read_as_stored(self) -> None:
        """Start the next streams without a conversion of texts, which the server has refused."""
        self._as_stored = True

    def start(self, epoch: int, captured_through: Lsn) -> SourceStream:
        """Return the stream at the end of the raw zone; start a stream if none is there.

        For errors see `CaptureSession.land`.
        """
        conn, captured = self.take_lease().conn, self._captured
        if self.source is not None and self.source.position == captured_through:
            check_publication(conn, captured.zone, captured.publication)
            return self.source
        self.end_stream()
        options = self._prepare(conn, epoch, captured_through)
        self.source = self._open_source(conn, epoch, captured_through, options)
        self.has_streamed = True
        self._diagnostics.begin(conn)
        is_standby = self.source.stream.is_standby
        self._heartbeats.begin(conn, epoch, captured_through, is_standby)
        return self.source

    def _prepare(self, conn: Connection, epoch: int, captured_through: Lsn) -> PluginOptions:
        """Check the slot, end the walsender of a dead capture, and return the stream's options."""
        captured = self._captured
        limits, zone, slot = captured.limits, captured.zone, captured.slot
        ours = captured.settings.application_name("capture")
        wait_or_terminate_stale_walsender(conn, slot, limits.slot_wait_seconds, ours)
        # Another owner explains a slot that has advanced.
        self._heartbeats.check(conn, epoch)
        status = check_slot(conn, zone, slot, captured_through)
        if limits.failover:
            keep_failover(conn, captured.settings, slot)
        check_publication(conn, zone, captured.publication)
        options = two_phase_options(conn, zone, epoch, status, limits.stream.plugin)
        if captured_through < self._whole_until:
            return replace(options, streaming=Streaming.OFF)
        return options

    def _open_source(
        self, conn: Connection, epoch: int, captured_through: Lsn, options: PluginOptions
    ) -> SourceStream:
        captured = self._captured
        limits, zone, slot = captured.limits, captured.zone, captured.slot
        self._notice = ""
        latest = zone.epochs.latest()
        if latest is not None:
            zone.check_relations(latest)
        stream = ReplicationStream(
            captured.settings,
            slot,
            captured.publication,
            captured_through,
            settings=replace(limits.stream, plugin=options, as_stored=self._as_stored),
            watch=build_watch(conn, self._is_overdue, limits.total_seconds, lambda: self._notice),
            check_timeline=lambda server: check_server_timeline(zone, server),
            on_notice=self._take_notice,
        )
        try:
            stream.__enter__()
            check_slot(conn, zone, slot, captured_through, stream.backend_pid)
            return SourceStream(stream, captured, conn, captured_through, epoch)
        except BaseException:
            stream.close()
            raise

    def _take_notice(self, text: str) -> None:
        """Report what the stream waits for, in the reader thread."""
        self._notice = (
            f"The server reports: {text.rstrip('.')}. The stream of slot {self._captured.slot}, "
            "which has failover, waits until each standby of synchronized_standby_slots has the "
            "WAL: start the standby, or take its slot out of this setting."
        )
        self._diagnostics.notify(self._notice)

    def finish(self) -> bool:
        """End the stream. Return whether the server has received all confirmations.

        Raises:
            ConnectionLost: the connection was lost.
        """
        source, self.source = self.source, None
        if source is None:
            return True
        try:
            return source.finish()
        finally:
            source.close()

    def end_stream(self) -> None:
        """Close the stream at once, and discard the messages in hand."""
        source, self.source = self.source, None
        if source is not None:
            source.close()

    def close(self) -> None:
        """Close the stream, and release the lease in an orderly way."""
        self.end_stream()
        self._held.close()

    def release(self) -> None:
        """Close both connections at once, which releases slot and lease."""
        self.end_stream()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.conn.close()  # The server releases the lease, without a wait for a reply.
        held, self._held = self._held, ExitStack()
        held.close()
