"""Capture one window: from the slot to a durable commit, and only then back to the slot.

The order is the design. The lease keeps other runners out; the slot is looked at while our own
walsender holds it, since START_REPLICATION skips silently to `confirmed_flush_lsn`; the window's
rows become visible in one commit; after that, and nowhere else, the window's end is confirmed.
Whatever dies in between, the next run either finds the window landed and confirms it, or finds
nothing of it and reads it again.
"""

from __future__ import annotations

import datetime as dt
import select
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.capture.landing import Landing
from pgcdc_assets.errors import (
    ConfigurationError,
    ConnectionLost,
    RawZoneError,
    SlotAdvanced,
    SlotBusy,
    SlotMissing,
    TransientError,
)
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.catalog import CatalogResolver
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.lease import capture_lease, wait_or_terminate_stale_walsender
from pgcdc_assets.postgres.publication import read_publication
from pgcdc_assets.postgres.slots import (
    SlotStatus,
    check_slot_usable,
    read_server_identity,
    read_slot_status,
    slot_lost_error,
)
from pgcdc_assets.postgres.stream.connection import ReplicationStream, StreamSettings
from pgcdc_assets.postgres.timelines import ServerTimeline, check_timeline
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.window_summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


@dataclass(frozen=True)
class CaptureLimits:
    """How long and how much.

    Attributes:
        total_seconds: a capture that has landed nothing after so long is given up; None for no
            limit. A landing that hangs, in the lake or for the stream's reader, is left behind
            `stream.end_seconds` later. What comes before the stream is not bounded by it: the look
            at the raw zone.
        slot_wait_seconds: how long the walsender of a dead runner may keep the slot before it is
            ended.
        stream: clocks and sizes of the stream: batch bytes, status interval, silence.
    """

    total_seconds: float | None = None
    slot_wait_seconds: float = 5.0
    stream: StreamSettings = field(default_factory=StreamSettings)


@dataclass(frozen=True)
class CaptureReport:
    """What capturing a window did.

    Attributes:
        already_captured: the window was landed before, and only confirmed now.
        counts: rows by `schema.table` and operation.
        seconds: from the first connection to the confirmed slot.
        warnings: how often something was seen that was not landed, by its description.
    """

    window: LsnWindow
    already_captured: bool
    row_count: int
    counts: Mapping[str, Mapping[str, int]]
    transaction_count: int
    first_commit_lsn: Lsn | None
    last_commit_lsn: Lsn | None
    first_commit_ts: dt.datetime | None
    last_commit_ts: dt.datetime | None
    bytes_received: int = 0
    seconds: float = 0.0
    warnings: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows_per_second(self) -> float:
        """Rows landed per second of the whole capture."""
        return self.row_count / self.seconds if self.seconds else 0.0


def capture_window(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    window: LsnWindow,
    limits: CaptureLimits | None = None,
) -> CaptureReport:
    """Land a window exactly once, and confirm it to the slot.

    A window that was landed before is verified, confirmed and reported with the same figures.

    Raises:
        ConfigurationError: the settings do not lead to a usable connection and slot.
        SlotBusy: another runner holds the lease, or another program the slot.
        SlotMissing, SlotLost, SlotAdvanced: the slot cannot give what the raw zone needs next.
        WindowUnavailable: the window was landed, and its rows are gone.
        RawZoneError: the window does not follow what is landed, or the raw zone is another slot's.
        ProtocolError: the stream broke its own rules.
        TransientError: the connection or the lake failed; nothing was confirmed, run it again.
    """
    limits = limits or CaptureLimits()
    began = time.monotonic()
    with (
        query_connection(settings, "lease") as conn,
        capture_lease(conn, zone.name, slot) as lease,
    ):
        captured_through = _check_raw_zone(conn, zone, slot, window)
        summary: WindowSummary | None = None
        if captured_through is None or window.end <= captured_through:
            summary = zone.changes.summary(window)
            if captured_through is None or not _is_behind(conn, slot, captured_through):
                return _report(summary, True, Counter(), 0, began)
        ours = settings.application_name("capture")
        wait_or_terminate_stale_walsender(conn, slot, limits.slot_wait_seconds, ours)
        _check_slot(conn, zone, slot, captured_through)
        _check_publication(conn, zone, publication)
        watch = _watch(conn, limits, began, lambda: summary is not None)
        stream = ReplicationStream(
            settings,
            slot,
            publication,
            captured_through,
            limits.stream,
            watch,
            lambda server: _check_timeline(zone, server),
        )
        already_captured = summary is not None
        warnings: Counter[str] = Counter()
        try:
            with stream:
                _check_slot(conn, zone, slot, captured_through, stream.backend_pid)
                if summary is None:
                    with closing(_catalog(settings, zone, publication, window)) as catalog:
                        decoder = _decoder(zone, catalog, window)
                        landing = Landing(zone, window, stream, decoder, lease, settings)
                        summary = landing.run_within(_seconds_left(limits, began))
                    warnings += decoder.warnings + catalog.warnings
                    failpoints.reach(failpoints.AFTER_DELTA_COMMIT)
                _confirm(stream, window, captured_through)
                failpoints.reach(failpoints.AFTER_STATUS_PACKET)
                if not stream.finish():
                    warnings["the server has not acknowledged the confirmed position yet"] += 1
        except ConnectionLost:
            # The lease's session may be as dead, and freeing the lease over it would wait for an
            # answer; without a session there is no lease.
            conn.close()
            raise
        return _report(summary, already_captured, warnings, stream.bytes_received, began)


def _check_raw_zone(conn: Connection, zone: RawZone, slot: str, window: LsnWindow) -> Lsn | None:
    """Say what the slot's epoch is captured through; None for a window of an older epoch.

    The slot of an older epoch is gone: what is landed of it is all that will ever be.
    """
    server = read_server_identity(conn)
    latest = zone.epochs.check_source(
        slot=slot, database=server.database, system_identifier=server.system_identifier
    )
    uri = zone.changes.table.uri
    if latest is None or window.epoch > latest.epoch:
        raise RawZoneError(
            raw_zone=uri,
            reason=f"it has no epoch {window.epoch}. Take the first snapshot: that makes the slot "
            "and records the epoch.",
        )
    if window.epoch < latest.epoch:
        return None
    captured_through = zone.changes.captured_through(window.epoch) or latest.start_lsn
    if window.start != captured_through and window.end > captured_through:
        raise RawZoneError(
            raw_zone=uri,
            reason=f"window {window.key} does not begin at {captured_through}, where the captured "
            "changes end. Capture windows in order.",
        )
    return captured_through


def _check_publication(conn: Connection, zone: RawZone, publication: str) -> None:
    """Refuse a publication that is gone."""
    try:
        read_publication(conn, publication)
    except ConfigurationError:
        copies = zone.snapshots.complete_snapshots()
        read_publication(conn, publication, [copy.name for copy in copies])


def _check_timeline(zone: RawZone, server: ServerTimeline) -> None:
    """Refuse a server that lost WAL which was captured, before it is asked for what follows."""
    epoch = zone.epochs.latest()
    assert epoch is not None
    through, timeline = zone.captured_on(epoch)
    check_timeline(zone.changes.table.uri, timeline, through, server)


def _is_behind(conn: Connection, slot: str, captured_through: Lsn) -> bool:
    """Say whether a slot was not told yet what is landed, as after a crash."""
    status = read_slot_status(conn, slot)
    if status is None or status.is_lost or status.confirmed_flush_lsn is None:
        return False
    return status.confirmed_flush_lsn < captured_through


def _check_slot(
    conn: Connection,
    zone: RawZone,
    slot: str,
    captured_through: Lsn,
    backend_pid: int | None = None,
) -> None:
    """Refuse a slot that cannot go on where the raw zone ends.

    Args:
        backend_pid: our walsender, once it holds the slot. Only then can nobody move it any more.
    """
    status = read_slot_status(conn, slot)
    if status is None:
        raise SlotMissing(slot=slot, raw_zone=zone.uri, captured_through=captured_through)
    check_slot_usable(status, conn.info.dbname)
    if status.is_lost:
        raise slot_lost_error(status)
    check_has_wal(zone, status, captured_through)
    confirmed = status.confirmed_flush_lsn
    if confirmed is not None and confirmed > captured_through:
        raise SlotAdvanced(
            slot=slot,
            confirmed_flush_lsn=confirmed,
            expected=captured_through,
            gap_bytes=confirmed - captured_through,
        )
    # A slot that nobody holds means that our stream has ended already, and reading it tells why.
    if backend_pid is not None and status.active_pid not in (backend_pid, None):
        raise SlotBusy(
            slot=slot,
            active_pid=status.active_pid,
            application_name=status.active_application_name,
        )


def check_has_wal(zone: RawZone, status: SlotStatus, captured_through: Lsn) -> None:
    """Check that the server's WAL reaches as far as what was captured from it.

    Raises:
        TransientError: it is a standby, which replays the rest after a restart.
        RawZoneError: it is a primary, whose WAL will say something else there.
    """
    if status.current_lsn >= captured_through:
        return
    if status.in_recovery:
        raise TransientError(
            reason=f"The standby has replayed its WAL through {status.current_lsn} so far, and "
            f"{zone.uri} is captured through {captured_through} already. Run it again when the "
            "standby has caught up."
        )
    raise RawZoneError(
        raw_zone=zone.changes.table.uri,
        reason=f"it is captured through {captured_through}, but the server's WAL ends at "
        f"{status.current_lsn}: the server was restored from a backup, or replaced by a standby "
        "that had not received all. Begin a new epoch with pgcdc renew.",
    )


def _catalog(
    settings: ConnectionSettings, zone: RawZone, publication: str, window: LsnWindow
) -> CatalogResolver:
    """Prepare to complete announced relations; nothing is asked before the first one."""

    def registered(relation_id: int) -> list[Relation]:
        return zone.relations.registered(window.epoch, relation_id)

    return CatalogResolver(settings, publication, registered)


def _decoder(zone: RawZone, catalog: CatalogResolver, window: LsnWindow) -> Decoder:
    def resolve(announced: Relation, commit_lsn: Lsn, xid: int) -> tuple[Relation, int]:
        relation = catalog.complete(announced, commit_lsn, xid)
        return relation, zone.relations.register(window.epoch, relation, commit_lsn)

    return Decoder(resolve, window.end, window.start)


def _confirm(stream: ReplicationStream, window: LsnWindow, captured_through: Lsn) -> None:
    """Tell the slot what is landed."""
    try:
        stream.confirm(max(window.end, captured_through))
    except ConnectionLost:
        raise
    except TransientError as error:
        # The stream ended while the window was being committed.
        raise TransientError(
            reason=f"Window {window.key} is landed and not confirmed yet; the next run confirms it "
            f"and goes on. {error}"
        ) from error


def _watch(
    conn: Connection, limits: CaptureLimits, began: float, has_landed: Callable[[], bool]
) -> Callable[[], None]:
    """Make the check that the stream's reader calls every second.

    A fast shutdown of the server ends the session that holds the lease first, and then waits for
    walsenders whose clients have not confirmed everything. We never do, so we leave.
    """
    hang_up = select.poll()
    hang_up.register(conn.fileno(), select.POLLRDHUP)
    server = f"database {conn.info.dbname}"

    def watch() -> None:
        if hang_up.poll(0):
            raise ConnectionLost(
                server=server,
                doing="capturing",
                reason="the server ended the session that holds the lease",
            )
        limit = limits.total_seconds
        if limit is not None and time.monotonic() - began > limit and not has_landed():
            raise TransientError(
                reason=f"The capture took longer than its limit of {limit:g} s. Nothing un-landed "
                "was confirmed; raise the limit or open smaller windows, then run it again."
            )

    return watch


def _seconds_left(limits: CaptureLimits, began: float) -> float | None:
    """Say how long a landing may take; None for no limit.

    At the limit itself the stream ends, and by that a landing which does not hang.
    """
    if limits.total_seconds is None:
        return None
    return max(0.0, began + limits.total_seconds - time.monotonic()) + limits.stream.end_seconds


def _report(
    summary: WindowSummary,
    already_captured: bool,
    warnings: Counter[str],
    bytes_received: int,
    began: float,
) -> CaptureReport:
    return CaptureReport(
        window=summary.window,
        already_captured=already_captured,
        row_count=summary.row_count,
        counts=summary.counts,
        transaction_count=summary.transaction_count,
        first_commit_lsn=summary.first_commit_lsn,
        last_commit_lsn=summary.last_commit_lsn,
        first_commit_ts=summary.first_commit_ts,
        last_commit_ts=summary.last_commit_ts,
        bytes_received=bytes_received,
        seconds=time.monotonic() - began,
        warnings=dict(warnings),
    )
