"""A new epoch: going on after a slot was lost, dropped, or advanced by somebody else, or after its
server went back (restored from a backup, replaced by a standby that had not received all).

What the old slot had not delivered is gone from the stream, so the tables have to be copied anew;
what is in the raw zone stays, under its own epoch. A slot that can still go on is never given up
here: dropping it would lose what it holds.

The order: the useless slot is dropped, a new one is made, the epoch is recorded. Killed in between,
the slot is missing, or stands where no landed window ends, and renewing again is right in both
cases.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import TYPE_CHECKING

from pgcdc_assets.errors import ConfigurationError, DefiniteError, SlotBusy
from pgcdc_assets.failpoints import reach
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.lease import capture_lease
from pgcdc_assets.postgres.publication import read_publication
from pgcdc_assets.postgres.slots import (
    SlotStatus,
    check_slot_usable,
    claim_slot,
    create_slot,
    drop_slot,
    has_publication_gap,
    read_server_identity,
    read_slot_status,
    slot_taken_error,
)
from pgcdc_assets.postgres.timelines import ServerTimeline, check_timeline, server_timeline
from pgcdc_assets.raw.epochs import Epoch

if TYPE_CHECKING:
    from pgcdc_assets.raw.zone import RawZone


def renew_epoch(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    *,
    adopt_slot: bool = False,
) -> Epoch:
    """Make a new slot and record it as the next epoch; copies of its tables are due after this.

    Args:
        adopt_slot: drop a slot even if something else has read it.

    Raises:
        ConfigurationError: there is no epoch yet, or the slot can go on.
        SlotTaken: something else has read the slot, and would lose it.
        SlotBusy: another runner holds the lease, or somebody reads the slot.
        TransientError: the slot could not be made now; run it again.
    """
    zone.lake.check_writable()
    with (
        query_connection(settings, "renew") as conn,
        capture_lease(conn, zone.name, slot),
    ):
        old = zone.epochs.latest()
        if old is None:
            raise ConfigurationError(
                reason=f"Capture {zone.name} has no epoch to renew: its first snapshot makes one "
                "(pgcdc sync)."
            )
        identity = read_server_identity(conn)
        with server_timeline(settings) as server:
            has_lost_wal = _has_lost_wal(zone, old, server)
        copies = zone.snapshots.complete_snapshots()
        read_publication(conn, publication, [copy.name for copy in copies])
        status = read_slot_status(conn, slot)
        if status is not None:
            check_slot_usable(status, identity.database)
            end = zone.changes.captured_through(old.epoch) or old.start_lsn
            is_ours = (old.slot, old.system_identifier) == (slot, identity.system_identifier)
            can_go_on = is_ours and _can_go_on(status, end) and not has_lost_wal
            if can_go_on and not has_publication_gap(conn, status, publication):
                raise ConfigurationError(
                    reason=f"Replication slot {slot} can go on from {end}: nothing is lost, and "
                    "giving it up would lose what it holds. Run pgcdc sync instead."
                )
            confirmed = status.confirmed_flush_lsn
            is_elsewhere = not is_ours or (confirmed is not None and confirmed > end)
            if is_elsewhere and status.was_read and not status.is_lost and not adopt_slot:
                raise slot_taken_error(
                    status, zone.lake.path(zone.name), "pgcdc renew --adopt-slot"
                )
            if status.is_active:
                raise SlotBusy(
                    slot=slot,
                    active_pid=status.active_pid,
                    application_name=status.active_application_name,
                )
            drop_slot(conn, slot)
        reach("after_slot_drop")
        with create_slot(settings, slot) as made:
            start = made.consistent_point
        reach("after_slot_creation")
        renewed = replace(
            old,
            epoch=old.epoch + 1,
            start_lsn=start,
            slot=slot,
            publication=publication,
            database=identity.database,
            system_identifier=identity.system_identifier,
            timeline=server.number,
            server_version=identity.server_version,
            created_at=dt.datetime.now(dt.UTC),
        )
        zone.epochs.append(renewed)
        claim_slot(conn, slot, publication)
        return renewed


def _has_lost_wal(zone: RawZone, epoch: Epoch, server: ServerTimeline) -> bool:
    """Say whether the server lost WAL that was captured."""
    through, timeline = zone.captured_on(epoch)
    try:
        check_timeline(zone.changes.table.uri, timeline, through, server)
    except DefiniteError:
        return True
    return False


def _can_go_on(status: SlotStatus, captured_through: Lsn) -> bool:
    # A standby catches up; a primary whose WAL ends before what we have writes other changes there.
    went_back = status.current_lsn < captured_through and not status.in_recovery
    confirmed = status.confirmed_flush_lsn
    can_stream = not status.is_lost and confirmed is not None and confirmed <= captured_through
    return can_stream and not went_back
