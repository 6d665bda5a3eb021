"""Maintenance of the raw zone: compaction, log cleanup and deletion of unreferenced files.

To open a table, delta-rs lists the table's log, and reads the entries after a checkpoint. After
thousands of small windows, maintenance therefore compacts small files, copies the window records to
`raw/windows`, removes old log entries after a checkpoint, and deletes files that no recent version
references (`vacuum.py`). Of the other tables, it deletes unreferenced files, and shortens the logs
of those that are written often. Maintenance may run concurrently with landings and readers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.error_text import first_sentence
from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.raw.delta.compaction import MINIMUM_FILES
from pgcdc_assets.raw.delta.log_cleanup import set_file_retention, shorten_log
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.raw.delta.vacuum import delete_old_files
from pgcdc_assets.raw.zone import RawZone

MINIMUM_LOG_ENTRIES = 256


@dataclass(frozen=True)
class RawMaintenanceReport:
    """The result of one maintenance call.

    Attributes:
        files_merged: number of compacted files of `raw/changes`.
        log_entries_saved: number of log entries whose window records were copied to `raw/windows`.
        files_removed: number of files deleted from all tables.
    """

    files_merged: int = 0
    log_entries_saved: int = 0
    files_removed: int = 0


def maintain_raw_zone(
    zone: RawZone,
    *,
    minimum_files: int = MINIMUM_FILES,
    minimum_log_entries: int = MINIMUM_LOG_ENTRIES,
) -> RawMaintenanceReport:
    """Compact files and clean up the log if the limits are reached.

    If files cannot be compacted, the other work is done before the error is raised.

    Args:
        zone: the raw zone.
        minimum_files: compact if `raw/changes` has at least so many small files.
        minimum_log_entries: clean up the log, and delete unreferenced files, if `raw/changes` has
            at least so many log entries that are not in `raw/windows`. Before the first window,
            clean up `raw/definitions` and `raw/table_list` if they have so many versions.

    Raises:
        TransientError: the lake could not be written. No row is lost; the next call continues.
        RawZoneError: the files do not contain the number of rows in the log. Nothing was changed.
    """
    try:
        return _maintain(zone, minimum_files, minimum_log_entries)
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise _failed(zone.changes.table, error) from error


def _maintain(zone: RawZone, minimum_files: int, minimum_log_entries: int) -> RawMaintenanceReport:
    table = zone.changes.table.load()
    if table is None:
        return RawMaintenanceReport(files_removed=_clean_before_windows(zone, minimum_log_entries))
    try:
        merged = sum(report.files_before for report in zone.changes.compact(minimum_files, table))
    except (PgcdcError, DeltaError, OSError, pa.ArrowException):
        _shorten(zone, table, 0, minimum_log_entries)
        raise
    if merged:
        table.update_incremental()
    return _shorten(zone, table, merged, minimum_log_entries)


def _clean_before_windows(zone: RawZone, minimum_log_entries: int) -> int:
    """Clean up the tables that grow before the first window: the results of looks at the catalog.

    Returns:
        Number of deleted files.
    """
    removed = 0
    for part in (zone.definitions.table, zone.table_list.table):
        loaded = part.load()
        if loaded is not None and loaded.version() >= minimum_log_entries:
            shorten_log(part.lake, part.uri, loaded)
            removed += _vacuum(part)
    return removed


def _shorten(
    zone: RawZone, table: DeltaTable, merged: int, minimum_log_entries: int
) -> RawMaintenanceReport:
    """Clean up the logs, and delete unreferenced files, if the limit is reached.

    The deletions come first: on a full disk, they free the space that all other steps need.

    Args:
        table: `raw/changes`.
        merged: number of compacted files.
    """
    changes = zone.changes
    unsaved = changes.window_index.unsaved_entries(table)
    if unsaved < minimum_log_entries:
        return RawMaintenanceReport(files_merged=merged)
    removed = _delete_files(zone)
    if not changes.window_index.save(table):
        # Otherwise entries whose windows are not copied could be removed.
        return RawMaintenanceReport(files_merged=merged, files_removed=removed)
    epoch = zone.epochs.latest()
    if epoch is not None:
        zone.prepared.remove_ended(epoch.epoch, zone.captured_on(epoch)[0])
    shorten_log(changes.table.lake, changes.table.uri, table)
    logs = (
        changes.window_index,
        zone.definitions,
        zone.table_list,
        zone.prepared,
        zone.ranges,
    )
    for other in (each.table for each in logs):
        loaded = other.load()
        if loaded is not None:
            shorten_log(other.lake, other.uri, loaded)
    if zone.ranges.remove_abandoned():
        removed += _delete_snapshot_files(zone)
    return RawMaintenanceReport(merged, unsaved, removed)


def _delete_files(zone: RawZone) -> int:
    """Delete the unreferenced files of all tables, and return their number."""
    tables = (
        zone.changes,
        zone.relations,
        zone.epochs,
        zone.ranges,
        zone.partial_snapshots,
        zone.prepared,
        zone.schema_events,
        zone.definitions,
        zone.table_list,
        zone.changes.window_index,
    )
    return sum(_vacuum(part.table) for part in tables) + _delete_snapshot_files(zone)


def _delete_snapshot_files(zone: RawZone) -> int:
    in_ranges = {file.path for landed in zone.ranges.all() for file in landed.files}
    return _vacuum(zone.snapshots.table, in_ranges)


def _vacuum(table: RawTable, spared: Collection[str] = ()) -> int:
    loaded = table.load()
    if loaded is None:
        return 0
    try:
        set_file_retention(table, loaded)
        return delete_old_files(table, loaded, spared)
    except (DeltaError, OSError) as error:
        raise _failed(table, error) from error


def _failed(table: RawTable, error: Exception) -> TransientError:
    return TransientError(
        reason=f"The maintenance of {table.uri} failed: {first_sentence(error)} No referenced "
        "file was removed. The next maintenance continues."
    )
