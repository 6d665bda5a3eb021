"""The end of a one-shot run: its barrier, and the schema events that it resolves."""

from __future__ import annotations

from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture


def fix_events(progress: SyncProgress, zone: RawZone, epoch: Epoch) -> None:
    """Fix the newest schema event that the run heals, after the first poll of the catalog.

    The poll records changes from before the barrier at an LSN above the barrier.
    """
    if progress.events_through is not None or progress.barrier is None or not progress.is_polled:
        return
    known = [event.position for event in zone.schema_events.read()]
    progress.events_through = max([Position(epoch.epoch, progress.barrier), *known])


def move_barrier(
    progress: SyncProgress,
    zone: RawZone,
    capture: CdcCapture,
    epoch: Epoch,
    through: Position,
    flush_lsn: Lsn,
) -> None:
    """Move the barrier past the snapshots that were taken since the start.

    If the run created the slot, the snapshots contain everything before the barrier, and the merge
    of the snapshots needs a first window. A table with history applies a re-snapshot after all
    changes before the re-snapshot. Of several re-snapshots, the first heals an event.

    Args:
        through: end of the newest landed window.
        flush_lsn: end of the WAL.
    """
    barrier = progress.barrier
    if barrier is None:
        return
    if through.lsn == epoch.start_lsn and barrier <= through.lsn:
        barrier = max(flush_lsn, Lsn(through.lsn + 1))
    healed = [
        event
        for event in zone.schema_events.read()
        if event.needs_snapshot
        and event.table in capture.table_names
        and (progress.events_through is None or event.position <= progress.events_through)
    ]
    snapshots = sorted(zone.snapshots.complete_snapshots(epoch.epoch), key=lambda s: s.position)
    for event in healed:
        of_event = (s for s in snapshots if s.name == event.table and s.position >= event.position)
        first = next(of_event, None)
        barrier = barrier if first is None else max(barrier, first.snapshot_lsn)
    progress.barrier = barrier
