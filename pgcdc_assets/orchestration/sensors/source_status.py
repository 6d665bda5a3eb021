"""The lag sensor's query of the source: the slot's status and the end of the WAL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgcdc_assets.capture.source_checks import check_server
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress
from pgcdc_assets.postgres.slots.status import SlotStatus, check_slot_usable, read_slot_status
from pgcdc_assets.postgres.wal.positions import emit_heartbeat, read_barrier, read_current_lsn
from pgcdc_assets.raw.zone import RawZone

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection


def read_source_status(
    conn: Connection, zone: RawZone, slot: str, progress: SyncProgress | None
) -> tuple[SlotStatus | None, Lsn]:
    """Return the slot's status and the end of the WAL; set the barrier of a one-shot run.

    Raises:
        ConfigurationError: the slot belongs to another database or plugin.
        RawZoneError: the slot is missing, and the database is not that of the raw zone.
        TransientError: the server is not available now.
    """
    status = read_slot_status(conn, slot)
    flush_lsn = status.current_lsn if status is not None else read_current_lsn(conn)
    if status is not None:
        check_slot_usable(status, conn.info.dbname)
        flush_lsn = _after_start(conn, zone, status)
    elif (epoch := zone.epochs.latest()) is not None:
        # The remedy of a missing slot would begin an epoch with the tables of another database.
        check_server(conn, zone, epoch)
    if progress is not None and progress.barrier is None:
        progress.barrier = read_barrier(conn)
        flush_lsn = max(flush_lsn, progress.barrier)
    return status, flush_lsn


def _after_start(conn: Connection, zone: RawZone, status: SlotStatus) -> Lsn:
    """Return the end of the WAL; if it is the start of the epoch, write WAL first.

    The first merge needs a window, and a window is never empty. If nothing was written since the
    start of the epoch, this function writes a transactional message.
    """
    epoch = zone.epochs.latest()
    if epoch is None or status.current_lsn > epoch.start_lsn or status.in_recovery:
        return status.current_lsn
    emit_heartbeat(conn)
    return read_barrier(conn)
