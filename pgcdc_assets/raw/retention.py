"""Removal of old windows from `raw/changes`, and of superseded snapshots.

One commit removes the rows and records the floor, which is the lowest retained LSN, as an
application transaction. Every version of the table therefore contains either all or none of the
rows below its floor. Asking for a removed window is an error that names the floor. VACUUM deletes
the files later, so running readers are not interrupted.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import pyarrow.compute as pc

from pgcdc_assets.errors import RawZoneError, TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.protocol.messages import POSTGRES_EPOCH_US
from pgcdc_assets.raw.delta.compaction import copy_rows, removals
from pgcdc_assets.raw.delta.scan import DataFile, count_rows, data_files, with_statistics
from pgcdc_assets.raw.delta.table import CommitRefused
from pgcdc_assets.raw.snapshots import (
    Snapshot,
    SnapshotIdentity,
    SnapshotStore,
    snapshot_of_file,
)
from pgcdc_assets.raw.windows.rows import LandedWindow
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName

# The time of a replicated transaction whose session gave none, as of a subscription's first copy.
_NO_TIME = dt.datetime.fromtimestamp(POSTGRES_EPOCH_US / 1e6, dt.UTC)


@dataclass(frozen=True)
class RetentionReport:
    """The result of a removal of windows.

    Attributes:
        epoch: the epoch.
        floor: the lowest retained LSN; None if nothing was ever removed.
        window_count: number of removed windows.
        row_count: number of removed rows.
        file_count: number of files removed from the log.
        missing_count: number of landed rows that another program had deleted before.
    """

    epoch: int
    floor: Lsn | None
    window_count: int = 0
    row_count: int = 0
    file_count: int = 0
    missing_count: int = 0


def remove_windows(
    zone: RawZone, epoch: int, merged_through: Lsn | None, older_than: dt.datetime
) -> RetentionReport:
    """Remove the windows of an epoch that are merged into all tables and older than a time.

    Rows of these windows that another program has deleted, such as personal data, are counted.

    Args:
        zone: the raw zone.
        epoch: the epoch.
        merged_through: the lowest watermark of all tables; None: all windows of a past epoch are
            merged.
        older_than: remove windows whose last commit is before this time.

    Raises:
        TransientError: the lake could not be written, or another process was faster.
        RawZoneError: the files contain more rows than were landed. Nothing was changed.
    """
    changes = zone.changes
    loaded = changes.table.newest()
    kept_from = changes.kept_from(epoch)
    if loaded is None:
        return RetentionReport(epoch, kept_from)
    removed_through = kept_from or Lsn(0)
    # With the window that ends at the floor, the newest one that was removed.
    since = max(removed_through - 1, 0)
    windows = changes.window_index.landed_windows(loaded, epoch, since)
    floor = _new_floor(windows, merged_through, older_than, dt.datetime.now(dt.UTC))
    if floor is None or floor <= removed_through:
        return RetentionReport(epoch, kept_from)
    gone = [each for each in windows if removed_through < each.window.end <= floor]
    row_count = sum(each.row_count for each in gone)
    removed, file_count = _remove_rows(zone, epoch, floor, row_count)
    return RetentionReport(epoch, floor, len(gone), removed, file_count, row_count - removed)


def remove_snapshots(zone: RawZone, merged: Mapping[TableName, Position]) -> int:
    """Remove the snapshots that no SCD table can be built from, and return their number.

    A snapshot is removed if retention has removed changes after the snapshot, and if a later
    snapshot of the same table is merged. The newest merged snapshot of a table is always retained.

    Args:
        zone: the raw zone.
        merged: epoch and LSN through which all SCD tables of a source table are merged, by (schema,
            table). A source table whose SCD tables keep history is missing: its snapshots are part
            of the history.

    Raises:
        TransientError: the lake could not be written, or another process was faster.
    """
    store = zone.snapshots
    snapshots = store.complete_snapshots()
    floors = zone.changes.floors({snapshot.epoch for snapshot in snapshots})
    useless = {
        snapshot.identity
        for snapshot in snapshots
        if snapshot.snapshot_lsn < floors[snapshot.epoch]
        and _is_superseded(snapshot, snapshots, merged.get(snapshot.name))
    }
    return _remove(zone, store, useless)


def remove_partial_snapshots(zone: RawZone) -> int:
    """Remove the partial snapshots below the floor of their epoch, and return their number.

    Their tables are merged past them, and a rebuild begins above the floor.

    Raises:
        TransientError: the lake could not be written, or another process was faster.
    """
    store = zone.partial_snapshots
    snapshots = store.complete_snapshots()
    floors = zone.changes.floors({snapshot.epoch for snapshot in snapshots})
    return _remove(zone, store, {s.identity for s in snapshots if s.snapshot_lsn < floors[s.epoch]})


def _remove(zone: RawZone, store: SnapshotStore, useless: Set[SnapshotIdentity]) -> int:
    """Remove snapshots of a store, and return their number."""
    loaded = store.table.load()
    if not useless or loaded is None:
        return 0
    files = [file for file in data_files(loaded) if snapshot_of_file(file).identity in useless]
    try:
        store.table.commit(
            loaded,
            [],
            removed=removals(files),
            app_id=f"pgcdc:{zone.name}:removed-copies",
            app_version=loaded.version() + 1,
            record={"removed_copies": len(useless)},
            data_change=False,
        )
    except CommitRefused as refusal:
        raise TransientError(
            reason=f"Another process wrote to {store.table.uri} at the same time. No snapshot "
            "was removed; the next maintenance continues."
        ) from refusal
    return len(useless)


def _is_superseded(
    snapshot: Snapshot, snapshots: Sequence[Snapshot], merged: Position | None
) -> bool:
    return merged is not None and any(
        other.name == snapshot.name and snapshot.position < other.position <= merged
        for other in snapshots
    )


def _new_floor(
    windows: Sequence[LandedWindow],
    merged_through: Lsn | None,
    older_than: dt.datetime,
    now: dt.datetime,
) -> Lsn | None:
    """Return the end of the newest window that may be removed; None without such a window.

    The source's clock may have been wrong for some commits:

    - A time later than now is wrong. Otherwise one commit with a clock of the future would end the
      retention until that time.
    - A time before that of an earlier window is wrong. Otherwise the commits of a clock of the past
      would be removed soon after their landing.
    - The time of a commit without a time is wrong.

    A window with such a time, or without rows, is removed with the next window with a right time.
    A wrong time that does not show delays the removal, by less than the error of the clock.

    Args:
        windows: with the newest removed window, whose time was right.
    """
    floor = newest = None
    for landed in windows:
        if merged_through is not None and landed.window.end > merged_through:
            break
        time = landed.last_commit_ts
        if time is None or time == _NO_TIME or time > now:
            continue
        if newest is not None and time < newest:
            continue
        if time >= older_than:
            break
        floor, newest = landed.window.end, time
    return floor


def _remove_rows(zone: RawZone, epoch: int, floor: Lsn, row_count: int) -> tuple[int, int]:
    """Remove the rows below the floor, and return the numbers of removed rows and files.

    Args:
        row_count: number of the rows that were landed.
    """
    changes = zone.changes
    table = changes.table
    loaded = table.load_or_create()
    known = with_statistics(table, data_files(loaded), ("epoch", "commit_lsn"))
    files = [file for file in known if _may_hold_older(file, epoch, floor)]
    crossing = [file for file in files if not _is_older(file, epoch, floor)]
    is_kept = (pc.field("epoch") != epoch) | (pc.field("commit_lsn") >= int(floor))
    with table.writer() as writer:
        copy_rows(table, crossing, writer, is_kept)
        kept = writer.finish()
        removed = count_rows(table, files) - sum(f.row_count for f in kept)
        # Fewer rows lose nothing here. More rows may be rows of later windows, in a file with wrong
        # statistics.
        if removed > row_count:
            raise RawZoneError(
                raw_zone=table.uri,
                reason=f"{row_count} rows were landed below {floor}, but the files contain "
                f"{removed}, so another program has added rows. Nothing was removed. Delete the "
                f"rows with epoch = {epoch} AND commit_lsn < {int(floor)} from the Delta table; "
                "the next maintenance then continues.",
            )
    # A failure from here on may follow a successful commit: the files are not removed.
    try:
        table.commit(
            loaded,
            kept,
            removed=removals(files),
            app_id=changes.floor_app_id(epoch),
            app_version=int(floor),
            excludes=changes.compaction_app_id,
            record={"kept_from": str(floor), "epoch": epoch, "removed_rows": row_count},
            # With dataChange = true, this commit would conflict with concurrent landings, and end
            # streaming readers of the table.
            data_change=False,
        )
    except CommitRefused as refusal:
        raise TransientError(
            reason=f"Another process maintained {table.uri} at the same time. Nothing was removed; "
            "the next maintenance continues."
        ) from refusal
    return removed, len(files)


def _may_hold_older(file: DataFile, epoch: int, floor: Lsn) -> bool:
    """Return whether a file may have rows of an epoch below its floor.

    A compaction by another program mixes epochs.
    """
    if not file.row_count:
        return False
    least, most = file.minimum, file.maximum
    return bool(least["epoch"] <= epoch <= most["epoch"] and least["commit_lsn"] < floor)


def _is_older(file: DataFile, epoch: int, floor: Lsn) -> bool:
    """Return whether all rows of a file are of an epoch below its floor."""
    is_of_epoch = file.minimum["epoch"] == epoch == file.maximum["epoch"]
    return bool(is_of_epoch and file.maximum["commit_lsn"] < floor)
