"""Checks of a capture: raw zone, slot, publication and server belong together.

The checks of the raw zone are made for each window. The checks of the slot and of the timeline are
made for each stream: while our walsender holds the slot, no other process can advance the slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgcdc_assets.errors import ConfigurationError, RawZoneError, SlotBusy, renewal_command
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.catalog.publication import read_publication
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.slots.creation import check_failover, enable_failover
from pgcdc_assets.postgres.slots.health import slot_health
from pgcdc_assets.postgres.slots.status import (
    SlotStatus,
    check_slot_usable,
    read_server_identity,
    read_slot_status,
)
from pgcdc_assets.postgres.wal.timelines import ServerTimeline, check_branch, check_timeline
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.zone import RawZone

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection


def check_raw_zone(conn: Connection, zone: RawZone, slot: str, window: LsnWindow) -> Lsn | None:
    """Return the end of the captured windows; None for a window of an older epoch.

    An older epoch has no slot any more, so its captured windows are final.

    Raises:
        RawZoneError: the window does not follow the captured windows, or the raw zone was filled
            from another slot.
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


def check_server(conn: Connection, zone: RawZone, epoch: Epoch) -> None:
    """Check that a connection is to the database that an epoch was captured from.

    A variable or a setting may name another server, such as a copy with other tables.

    Raises:
        RawZoneError: the connection is to another database or cluster.
    """
    server = read_server_identity(conn)
    zone.epochs.check_source(
        slot=epoch.slot, database=server.database, system_identifier=server.system_identifier
    )


def check_publication(conn: Connection, zone: RawZone, publication: str) -> None:
    """Raise ConfigurationError for a missing publication, with its CREATE PUBLICATION statement."""
    try:
        read_publication(conn, publication)
    except ConfigurationError:
        copies = zone.snapshots.complete_snapshots()
        tables = [copy.name for copy in copies]
        read_publication(conn, publication, tables, renewal_command(zone.name))


def check_server_timeline(zone: RawZone, server: ServerTimeline) -> None:
    """Raise an error for a server that has lost the WAL of captured changes or of a snapshot.

    Raises:
        RawZoneError, DefiniteError, OSError: as `check_timeline`.
    """
    epoch = zone.epochs.latest()
    assert epoch is not None
    captured_on = zone.captured_on(epoch)[1]
    check_branch(zone.changes.table.uri, captured_on, zone.timeline_start(epoch), server)
    if captured_on != server.number:
        for through, timeline in zone.used_timelines(epoch):
            check_timeline(zone.changes.table.uri, timeline, through, server)


def is_behind(conn: Connection, slot: str, captured_through: Lsn) -> bool:
    """Return whether a landed window is not confirmed to the slot, as after a crash."""
    status = read_slot_status(conn, slot)
    if status is None or status.is_lost or status.confirmed_flush_lsn is None:
        return False
    return status.confirmed_flush_lsn < captured_through


def keep_failover(conn: Connection, settings: ConnectionSettings, slot: str) -> None:
    """Let standbys keep a copy of an inactive slot, if the slot does not allow it yet.

    Raises:
        ConfigurationError: the server is older than Postgres 17, or a standby.
        SlotBusy: a walsender reads the slot.
    """
    status = read_slot_status(conn, slot)
    if status is not None and not status.has_failover:
        check_failover(conn.server_version, status.in_recovery)
        enable_failover(settings, slot)


def check_slot(
    conn: Connection,
    zone: RawZone,
    slot: str,
    captured_through: Lsn,
    backend_pid: int | None = None,
) -> SlotStatus:
    """Return the slot's status; raise an error for a slot that cannot continue the raw zone.

    Args:
        backend_pid: pid of the capture's walsender after the start of the stream.
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
    return status
