"""The owner of a slot, as a heartbeat table in the source names it.

The table is optional (setting `heartbeat.table`). Two lakes with one table see each other before
either of them reads the slot. Also, the newest captured heartbeat is part of the raw zone: if the
source has an earlier one in the same table, the source was restored to a time before captured
changes, on the same timeline. A missing, edited or reloaded row proves nothing and is replaced.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pgcdc_assets.errors import ConfigurationError, RawZoneError, TransientError, renewal_command
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.heartbeat import (
    Heartbeat,
    HeartbeatRow,
    SlotOwner,
    find_table_id,
    read_heartbeat,
    write_heartbeat,
)
from pgcdc_assets.postgres.slots.status import SlotStatus, slot_taken_error
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import HeartbeatPolicy

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

_logger = logging.getLogger(__name__)


def sync_remedy(capture: str) -> str:
    """Return the command that takes over the slot of a capture."""
    return f"pgcdc sync --name {capture} --adopt-slot"


def read_row(
    conn: Connection, policy: HeartbeatPolicy | None, status: SlotStatus | None
) -> HeartbeatRow | None:
    """Return the heartbeat of an existing slot of a primary; None if there is none.

    The row of a slot that does not exist any more is obsolete. A standby may have an old row.
    """
    table = None if policy is None else policy.table_name
    if table is None or status is None or status.in_recovery:
        return None
    return read_heartbeat(conn, table, status.slot)


def is_owner(row: HeartbeatRow, zone: RawZone) -> bool:
    """Return whether a raw zone has written a heartbeat."""
    return (row.owner.capture, row.owner.lake_id) == (zone.name, zone.epochs.find_id())


def check_owner(row: HeartbeatRow | None, status: SlotStatus, zone: RawZone, remedy: str) -> None:
    """Raise an error if a heartbeat names another owner of the slot.

    Raises:
        SlotTaken: the slot belongs to another capture or lake.
    """
    if row is None or is_owner(row, zone):
        return
    owner = row.owner
    raise slot_taken_error(
        status,
        zone.lake.path(zone.name),
        remedy,
        f"capture {owner.capture} of lake {owner.lake} (epoch {owner.epoch}, seen at {_at(row)})",
    )


def check_restore(row: HeartbeatRow | None, zone: RawZone, epoch: int) -> None:
    """Raise an error if the source has an earlier heartbeat than the raw zone.

    Raises:
        RawZoneError: the source was restored, and lacks captured changes.
    """
    # A row of an earlier epoch counts: the server was restored to a time before the renewal.
    if row is None or not row.is_original or row.owner.epoch > epoch or not is_owner(row, zone):
        return
    captured = zone.changes.captured_heartbeat(epoch, row.table_id)
    if captured is None or row.number >= captured:
        return
    raise RawZoneError(
        raw_zone=zone.changes.table.uri,
        reason=f"captured through heartbeat {captured}, but the newest heartbeat in the source is "
        f"{row.number}, written at {_at(row)}: the server was restored from an older copy, and "
        "does not have the captured changes. Nothing was confirmed. Begin a new epoch with "
        f"{renewal_command(zone.name)}.",
    )


def record_owner(
    conn: Connection,
    zone: RawZone,
    policy: HeartbeatPolicy | None,
    slot: str,
    epoch: int,
    captured_through: Lsn,
) -> Heartbeat | None:
    """Write the raw zone as the owner of a slot, in place of any other owner.

    Without a heartbeat table nothing is written. The server must be a primary.

    Raises:
        ConfigurationError: the row cannot be written.
        TransientError: the row is locked.
    """
    table = None if policy is None else policy.table_name
    if table is None:
        return None
    # A number below a captured one would look like a restored source, also in a new row.
    table_id = find_table_id(conn, table)
    captured = table_id and zone.changes.captured_heartbeat(epoch, table_id)
    owner = SlotOwner(slot, zone.name, zone.lake.path(zone.name), zone.epochs.create_id(), epoch)
    return write_heartbeat(conn, table, owner, captured_through, captured or 0, takes_over=True)


def record_new_owner(
    conn: Connection,
    zone: RawZone,
    policy: HeartbeatPolicy | None,
    slot: str,
    epoch: int,
    start: Lsn,
) -> None:
    """Write the owner of a new epoch's slot. A failure is logged: the first stream tries again."""
    try:
        record_owner(conn, zone, policy, slot, epoch, start)
    except (ConfigurationError, TransientError) as error:
        _logger.warning("%s", error)


def _at(row: HeartbeatRow) -> str:
    return f"{row.written_at:%Y-%m-%d %H:%M:%S %z}"
