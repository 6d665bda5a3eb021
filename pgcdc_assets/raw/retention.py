"""Removing old windows from `raw/changes`, and the floor that says which; and useless copies.

One commit takes the rows out and records the floor: the lowest LSN that is kept, as an application
transaction of its own. So nobody sees a floor with rows below it missing in part, and whoever asks
for more than there is gets a sentence with the floor in it. Files lie about until VACUUM removes
them: a reader that began before goes on undisturbed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from pgcdc_assets.errors import RawZoneError, TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.compaction import copy_rows, removals
from pgcdc_assets.raw.scan import DataFile, data_files
from pgcdc_assets.raw.snapshots import Snapshot, snapshot_of_file
from pgcdc_assets.raw.table import CommitRefused
from pgcdc_assets.raw.window_summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName


@dataclass(frozen=True)
class RetentionReport:
    """What was removed from an epoch.

    Attributes:
        floor: the lowest LSN that is kept; None when nothing was ever removed.
    """

    epoch: int
    floor: Lsn | None
    window_count: int = 0
    row_count: int = 0
    file_count: int = 0


def remove_windows(
    zone: RawZone, epoch: int, merged_through: Lsn | None, older_than: dt.datetime
) -> RetentionReport:
    """Remove an epoch's windows that are merged everywhere and old enough, oldest first.

    Args:
        merged_through: the lowest watermark of all tables; None: the epoch is over, and all of it
            is merged.
        older_than: the time before which a window's last commit has to lie.

    Raises:
        TransientError: the lake could not be written, or other upkeep was faster.
        RawZoneError: files do not hold the rows that the log says; they were left as they are.
    """
    changes = zone.changes
    kept_from = changes.kept_from(epoch)
    windows = changes.windows(epoch)
    floor = _new_floor(windows, merged_through, older_than)
    if floor is None or (kept_from is not None and floor <= kept_from):
        return RetentionReport(epoch, kept_from)
    gone = [summary for summary in windows if summary.window.end <= floor]
    row_count = sum(summary.row_count for summary in gone)
    file_count = _remove_rows(zone, epoch, floor, row_count)
    return RetentionReport(epoch, floor, len(gone), row_count, file_count)


def remove_snapshots(zone: RawZone, merged: Mapping[TableName, Position]) -> int:
    """Remove copies that no table can be made of any more; return how many.

    Those are copies after which retention has removed changes, where a later copy of the table is
    merged. The newest merged copy of a table stays, whatever was removed after it.

    Args:
        merged: by schema and table, epoch and LSN through which all its SCD tables are merged.
            Without tables that show what was before their newest copy: these count their copies.

    Raises:
        TransientError: the lake could not be written, or another upkeep or copy was faster.
    """
    snapshots = zone.snapshots
    copies = snapshots.complete_snapshots()
    floors = zone.changes.floors({copy.epoch for copy in copies})
    useless = {
        copy.identity
        for copy in copies
        if copy.snapshot_lsn < floors[copy.epoch]
        and _is_superseded(copy, copies, merged.get(copy.name))
    }
    loaded = snapshots.table.load()
    if not useless or loaded is None:
        return 0
    files = [file for file in data_files(loaded) if snapshot_of_file(file).identity in useless]
    try:
        snapshots.table.commit(
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
            reason=f"Somebody else wrote to {snapshots.table.uri}; no copy was removed. The next "
            "upkeep goes on."
        ) from refusal
    return len(useless)


def _is_superseded(copy: Snapshot, copies: Sequence[Snapshot], merged: Position | None) -> bool:
    return merged is not None and any(
        other.name == copy.name and copy.position < other.position <= merged for other in copies
    )


def _new_floor(
    windows: Sequence[WindowSummary], merged_through: Lsn | None, older_than: dt.datetime
) -> Lsn | None:
    """Find the end of the newest window that may go; those before it may go too.

    Windows without rows have no age of their own: they go with the next one that has.
    """
    floor = None
    for summary in windows:
        is_merged = merged_through is None or summary.window.end <= merged_through
        if not is_merged:
            break
        if summary.last_commit_ts is None:
            continue
        if summary.last_commit_ts >= older_than:
            break
        floor = summary.window.end
    return floor


def _remove_rows(zone: RawZone, epoch: int, floor: Lsn, row_count: int) -> int:
    """Remove the rows below the floor; return how many files that took out."""
    changes = zone.changes
    table = changes.table
    loaded = table.load_or_create()
    files = [file for file in data_files(loaded) if _holds_older(file, epoch, floor)]
    crossing = [file for file in files if file.maximum["commit_lsn"] >= floor]
    with table.writer() as writer:
        copy_rows(table, crossing, writer, pc.field("commit_lsn") >= int(floor))
        kept = writer.finish()
        removed = sum(f.row_count for f in files) - sum(f.row_count for f in kept)
        if removed != row_count:
            raise RawZoneError(
                raw_zone=table.uri,
                reason=f"{row_count} rows were landed below {floor}, but {removed} are there. "
                "Nothing was removed.",
            )
    # From here on a failure may come after the commit took effect: files stay where they are.
    try:
        table.commit(
            loaded,
            kept,
            removed=removals(files),
            app_id=changes.floor_app_id(epoch),
            app_version=int(floor),
            excludes=changes.compaction_app_id,
            record={"kept_from": str(floor), "epoch": epoch, "removed_rows": row_count},
            # Nothing changed at the source. A commit that says otherwise refuses every landing that
            # began before it, and ends streams that read the table.
            data_change=False,
        )
    except CommitRefused as refusal:
        raise TransientError(
            reason=f"Other upkeep of {table.uri} was faster; nothing was removed. The next one "
            "goes on."
        ) from refusal
    return len(files)


def _holds_older(file: DataFile, epoch: int, floor: Lsn) -> bool:
    return bool(file.minimum["epoch"] == epoch and file.minimum["commit_lsn"] < floor)
