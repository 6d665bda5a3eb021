"""Capture of one window: read the slot, commit the rows, then confirm the window's end.

The order of the steps prevents loss and duplication:

1. Take the lease, which excludes other captures of the slot.
2. Start the stream, then check the slot while the capture's walsender holds the slot:
   START_REPLICATION skips silently to `confirmed_flush_lsn` (src/backend/replication/logical/
   logical.c, CreateDecodingContext).
3. Land the window's rows in one durable commit.
4. Confirm the window's end to the server. No other step confirms an LSN.

If the process dies between two steps, the next run either finds the window landed and confirms its
end, or finds nothing of the window and reads the window again.
"""

from __future__ import annotations

import datetime as dt
import select
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.capture.landing import Landing, UndecodableRows
from pgcdc_assets.capture.schema_watch import SchemaWatch
from pgcdc_assets.errors import (
    ConfigurationError,
    ConnectionLost,
    RawZoneError,
    SlotBusy,
    TransientError,
)
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.lease import capture_lease, wait_or_terminate_stale_walsender
from pgcdc_assets.postgres.publication import read_publication
from pgcdc_assets.postgres.relation_resolver import CatalogResolver
from pgcdc_assets.postgres.slot_health import slot_health
from pgcdc_assets.postgres.slots import (
    check_slot_usable,
    read_server_identity,
    read_slot_status,
)
from pgcdc_assets.postgres.stream.connection import ReplicationStream, StreamSettings
from pgcdc_assets.postgres.timelines import ServerTimeline, check_timeline
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.window_summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection


@dataclass(frozen=True)
class CaptureLimits:
    """Time limits and sizes of a capture.

    Attributes:
        total_seconds: time limit until the window is landed; None: no limit. A landing that hangs
            is abandoned `stream.end_seconds` after the limit. The limit does not bound the check of
            the raw zone before the stream.
        slot_wait_seconds: time to wait before the stale walsender of a dead capture is ended.
        stream: time limits and sizes of the stream.
    """

    total_seconds: float | None = None
    slot_wait_seconds: float = 5.0
    stream: StreamSettings = field(default_factory=StreamSettings)


@dataclass(frozen=True)
class CaptureReport:
    """The result of the capture of a window.

    Attributes:
        already_captured: an earlier run has landed the window; this run confirmed its end at most.
        counts: number of rows by `schema.table` and operation.
        first_commit_lsn: lowest commit LSN; None without rows, like the next three.
        bytes_received: bytes of the stream.
        seconds: time from the first connection to the confirmation.
        warnings: counts of messages and values that were not landed as sent, by description.
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
        """Rows per second of the whole capture."""
        return self.row_count / self.seconds if self.seconds else 0.0


def capture_window(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    window: LsnWindow,
    limits: CaptureLimits | None = None,
) -> CaptureReport:
    """Land a window exactly once, and confirm its end to the slot.

    A landed window is verified, confirmed and reported with the same counts. Rows that cannot be
    decoded are read again over another connection, and then parked (see `protocol.parked`).

    Raises:
        ConfigurationError: the settings do not lead to a usable connection and slot.
        SlotBusy: another capture holds the lease, or another program reads the slot.
        SlotMissing, SlotLost, SlotAdvanced: the slot cannot send the next changes of the raw zone.
        WindowUnavailable: the window was landed, but rows are missing.
        RawZoneError: the window does not follow the landed windows, or the raw zone was filled from
            another slot.
        ProtocolError: the stream contains a malformed message.
        TransientError: the connection or the lake failed. Nothing was confirmed; run it again.
    """
    limits = limits or CaptureLimits()
    began = time.monotonic()
    arguments = settings, zone, slot, publication, window, limits, began
    try:
        return _capture(*arguments, parks=False)
    except UndecodableRows:
        # A connection may have altered the bytes: park rows that two connections bring.
        return _capture(*arguments, parks=True)


def _capture(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    window: LsnWindow,
    limits: CaptureLimits,
    began: float,
    *,
    parks: bool,
) -> CaptureReport:
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
                        schema = SchemaWatch(zone, publication, window.epoch, settings=settings)
                        decoder = _decoder(catalog, schema, window)
                        end = None if limits.total_seconds is None else began + limits.total_seconds
                        landing = Landing(
                            zone, window, stream, decoder, lease, settings, schema, end, parks
                        )
                        summary = landing.run_within(_seconds_left(limits, began))
                    warnings += decoder.warnings + catalog.warnings + Counter(schema.warnings)
                    failpoints.reach(failpoints.AFTER_DELTA_COMMIT)
                _confirm(stream, window, captured_through)
                failpoints.reach(failpoints.AFTER_STATUS_PACKET)
                if not stream.finish():
                    warnings["the server has not acknowledged the confirmed position yet"] += 1
        except ConnectionLost:
            # The lease's session may be lost as well, and releasing the lease would wait for a
            # reply. Closing the session releases the lease.
            conn.close()
            raise
        return _report(summary, already_captured, warnings, stream.bytes_received, began)


def _check_raw_zone(conn: Connection, zone: RawZone, slot: str, window: LsnWindow) -> Lsn | None:
    """Return the end of the captured windows; None for a window of an older epoch.

    An older epoch has no slot any more, so its captured windows are final.
    """
    server = read_server_identity(conn)
    latest = zone.epochs.check_source(
        slot=slot, database=server.database, system_identifier=server.system_identifier
    )
    uri = zone.changes.table.uri
    if latest is None or window.epoch > latest.epoch:
        raise RawZoneError(
            raw_zone=uri,
            reason=f"the raw zone has no epoch {window.epoch}. Take the first snapshot, which "
            "creates the slot and records the epoch.",
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
    """Raise ConfigurationError for a missing publication, with its CREATE PUBLICATION statement."""
    try:
        read_publication(conn, publication)
    except ConfigurationError:
        copies = zone.snapshots.complete_snapshots()
        read_publication(conn, publication, [copy.name for copy in copies])


def _check_timeline(zone: RawZone, server: ServerTimeline) -> None:
    """Raise an error for a server that has lost captured WAL, before the stream starts."""
    epoch = zone.epochs.latest()
    assert epoch is not None
    through, timeline = zone.captured_on(epoch)
    check_timeline(zone.changes.table.uri, timeline, through, server)


def _is_behind(conn: Connection, slot: str, captured_through: Lsn) -> bool:
    """Return whether a landed window is not confirmed to the slot, as after a crash."""
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
    """Raise an error for a slot that cannot continue at the end of the raw zone.

    Args:
        backend_pid: pid of the capture's walsender after the start of the stream. While this
            walsender holds the slot, no other process can advance the slot.
    """
    status = read_slot_status(conn, slot)
    if status is not None:
        check_slot_usable(status, conn.info.dbname)
    error = slot_health(status, captured_through).error(slot, zone.uri, zone.name)
    if error is not None:
        raise error
    assert status is not None
    # An inactive slot means that the stream has ended already: reading the stream raises the error.
    if backend_pid is not None and status.active_pid not in (backend_pid, None):
        raise SlotBusy(
            slot=slot,
            active_pid=status.active_pid,
            application_name=status.active_application_name,
        )


def _catalog(
    settings: ConnectionSettings, zone: RawZone, publication: str, window: LsnWindow
) -> CatalogResolver:
    """Return the resolver of announced relations, which connects at the first announcement."""
    zone.relations.discard()

    look = cache(lambda: zone.definitions.read(window.epoch))

    def known(relation_id: int) -> list[tuple[Lsn, Relation]]:
        seen = look().tables.get(relation_id)
        looked = [] if seen is None else [(seen.lsn, seen.definition.relation)]
        registered = zone.relations.registered(window.epoch, relation_id)
        return sorted([*looked, *registered], key=lambda version: version[0])

    return CatalogResolver(settings, publication, known)


def _decoder(catalog: CatalogResolver, schema: SchemaWatch, window: LsnWindow) -> Decoder:
    def resolve(announced: Relation, commit_lsn: Lsn, xid: int) -> tuple[Relation, int]:
        completed = catalog.complete(announced, commit_lsn, xid)
        version = schema.register(completed.relation, commit_lsn, completed.doubt)
        return completed.relation, version

    return Decoder(resolve, window.end, window.start)


def _confirm(stream: ReplicationStream, window: LsnWindow, captured_through: Lsn) -> None:
    """Confirm the end of the landed windows to the slot."""
    try:
        stream.confirm(max(window.end, captured_through))
    except ConnectionLost:
        raise
    except TransientError as error:
        # The stream ended during the commit of the window.
        raise TransientError(
            reason=f"Window {window.key} is landed, but its end is not confirmed yet. The next run "
            f"confirms the end and continues. {error}"
        ) from error


def _watch(
    conn: Connection, limits: CaptureLimits, began: float, has_landed: Callable[[], bool]
) -> Callable[[], None]:
    """Return the check that the stream's reader thread calls every second.

    A fast shutdown of the server ends the lease's session first, and then waits until every
    walsender's client has confirmed all WAL. A capture does not confirm all WAL, so the check ends
    the stream when the lease's session has ended.
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
                "was confirmed. Raise the limit or use smaller windows, then run it again."
            )

    return watch


def _seconds_left(limits: CaptureLimits, began: float) -> float | None:
    """Return the time limit of a landing in seconds; None for no limit.

    The stream ends at the capture's limit, which ends a landing that does not hang. The landing's
    limit is therefore later.
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
