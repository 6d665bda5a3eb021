"""Start of a new epoch with a new slot.

A new epoch is necessary after a slot was lost, dropped or advanced by another program, and after
its server lost captured WAL (restored from a backup, or replaced by a standby that had not received
all WAL). The changes that the old slot has not delivered are lost, so every table needs a new
snapshot. The raw zone keeps the earlier epochs. A slot that can continue is not dropped, because
the drop would lose the changes of the slot.

The order of the steps: drop the unusable slot, create the new slot, record the epoch. If the
process dies in between, the slot is missing or its position is not the end of a landed window. A
repetition is right in both cases.
"""

from __future__ import annotations

import datetime as dt
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.capture.slot_owner import check_owner, check_restore, read_row, record_new_owner
from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    RawZoneError,
    SlotBusy,
    renewal_command,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.publication import read_publication
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.heartbeat import HeartbeatRow
from pgcdc_assets.postgres.slots.creation import SlotOptions, check_failover
from pgcdc_assets.postgres.slots.health import slot_health
from pgcdc_assets.postgres.slots.lease import capture_lease
from pgcdc_assets.postgres.slots.status import (
    SlotStatus,
    check_slot_usable,
    create_slot,
    drop_slot,
    read_server_identity,
    read_slot_status,
    slot_taken_error,
)
from pgcdc_assets.postgres.stream.slot_peeks import claim_slot, has_publication_gap
from pgcdc_assets.postgres.wal.timelines import (
    ServerTimeline,
    check_branch,
    find_shared_end,
    server_timeline,
)
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.settings.policies import SlotPolicy

if TYPE_CHECKING:
    from pgcdc_assets.raw.zone import RawZone


_SLOT_POLICY = SlotPolicy()


def renew_epoch(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    *,
    adopt_slot: bool = False,
    slot_policy: SlotPolicy = _SLOT_POLICY,
) -> Epoch:
    """Create a new slot and record the next epoch. The tables need new snapshots after this call.

    Args:
        settings: the source database.
        zone: the raw zone.
        slot: the slot's name.
        publication: the publication's name.
        adopt_slot: drop the slot even if another program has read the slot.
        slot_policy: how the capture treats its slot.

    Raises:
        ConfigurationError: the capture has no epoch yet, or the slot can continue.
        SlotTaken: another program has read the slot, and may need its changes.
        SlotBusy: another capture holds the lease, or a walsender reads the slot.
        TransientError: the slot could not be created now. Run it again.
    """
    zone.lake.check_writable()
    with (
        query_connection(settings, "renew") as conn,
        capture_lease(conn, zone.name, slot),
    ):
        old, remedy = zone.epochs.latest(), f"{renewal_command(zone.name)} --adopt-slot"
        if old is None:
            raise ConfigurationError(
                reason=f"Capture {zone.name} has no epoch to renew: the first snapshot starts "
                "epoch 1. Run pgcdc sync."
            )
        identity = read_server_identity(conn)
        if slot_policy.failover:
            # Before the old slot is dropped.
            check_failover(identity.server_version, identity.in_recovery)
        row = read_row(conn, slot_policy.heartbeat, read_slot_status(conn, slot))
        with server_timeline(settings) as server:
            lost = _find_lost_wal(zone, old, server, row)
        end = zone.changes.captured_through(old.epoch) or old.start_lsn
        copies = zone.snapshots.complete_snapshots()
        tables = [copy.name for copy in copies]
        read_publication(conn, publication, tables, renewal_command(zone.name))
        status = read_slot_status(conn, slot)
        if status is not None:
            check_slot_usable(status, identity.database)
            is_ours = (old.slot, old.system_identifier) == (slot, identity.system_identifier)
            can_continue = is_ours and slot_health(status, end).can_continue and lost is None
            if not adopt_slot:
                check_owner(row, status, zone, remedy)
            if (
                can_continue
                and not _lacks_stored_rows(zone, old, status)
                and not has_publication_gap(conn, settings, status, publication)
            ):
                raise ConfigurationError(
                    reason=f"Replication slot {slot} can continue from {end}: no change is lost, "
                    "and dropping the slot would lose changes. Run pgcdc sync instead. Only if its "
                    "error asks for a new epoch, drop the slot first: select "
                    f"pg_drop_replication_slot('{slot}')"
                )
            confirmed = status.confirmed_flush_lsn
            is_elsewhere = not is_ours or (confirmed is not None and confirmed > end)
            if is_elsewhere and status.was_read and not status.is_lost and not adopt_slot:
                raise slot_taken_error(status, zone.lake.path(zone.name), remedy)
            if status.is_active:
                raise SlotBusy(
                    slot=slot,
                    active_pid=status.active_pid,
                    application_name=status.active_application_name,
                )
            drop_slot(conn, slot)
        failpoints.reach(failpoints.AFTER_SLOT_DROP)
        options = SlotOptions(failover=slot_policy.failover, exports_snapshot=False)
        with create_slot(settings, slot, options=options) as made:
            start = made.consistent_point
        if lost is None and start < end and not identity.in_recovery:
            # The server was restored from a copy, without a new timeline.
            lost = Lsn(0)
        is_same = old.system_identifier == identity.system_identifier
        failpoints.reach(failpoints.AFTER_SLOT_CREATION)
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
            shared_through=lost if is_same else None,
        )
        if not identity.in_recovery:
            record_new_owner(conn, zone, slot_policy.heartbeat, slot, renewed.epoch, start)
        zone.epochs.append(renewed)
        claim_slot(conn, slot, publication)
        return renewed


def _lacks_stored_rows(zone: RawZone, epoch: Epoch, status: SlotStatus) -> bool:
    """Return whether the raw zone lacks rows that the slot does not send again.

    A capture stops for these reasons although its slot can continue.
    """
    if status.two_phase and zone.prepared.two_phase_from(epoch.epoch) is None:
        return True
    try:
        zone.check_relations(epoch)
        for each in zone.prepared.unfinished(epoch.epoch, zone.captured_on(epoch)[0]):
            deque(each.read(), maxlen=0)
    except RawZoneError:
        return True
    return False


def _find_lost_wal(
    zone: RawZone, epoch: Epoch, server: ServerTimeline, row: HeartbeatRow | None
) -> Lsn | None:
    """Return the LSN above which the server lacks used WAL; 0 if unknown, None if it lacks none."""
    found = []
    try:
        branch = zone.captured_on(epoch)[1], zone.timeline_start(epoch)
        check_branch(zone.changes.table.uri, *branch, server)
        for through, timeline in zone.used_timelines(epoch):
            shared = find_shared_end(timeline, through, server)
            if shared < through:
                found.append(shared)
        if not found:
            check_restore(row, zone, epoch.epoch)
    except DefiniteError:
        return Lsn(0)
    return min(found, default=None)
