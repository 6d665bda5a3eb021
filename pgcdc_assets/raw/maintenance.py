"""What keeps thousands of small windows cheap: fewer files, a short log, no orphans.

Opening a table lists its log, and each landing opens it twice. So the small files are merged, the
window records saved in `raw/windows`, the log's older entries removed after a checkpoint, and files
that no recent version references are deleted (`vacuum.py`). Of the other tables, which grow slowly,
only the last is done. All of it may run beside landings and readers.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.compaction import MINIMUM_FILES
from pgcdc_assets.raw.table import RawTable, first_line
from pgcdc_assets.raw.vacuum import delete_old_files
from pgcdc_assets.raw.zone import RawZone

MINIMUM_LOG_ENTRIES = 256


@dataclass(frozen=True)
class RawMaintenanceReport:
    """What one upkeep did.

    Attributes:
        files_merged: small files of `raw/changes` that went into larger ones.
        log_entries_saved: entries of its log whose windows are in `raw/windows` now.
        files_removed: deleted from all tables.
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
    """Do what is due; below both limits nothing is written.

    Raises:
        TransientError: the lake could not be written; the rows are safe, and the next upkeep goes
            on.
        RawZoneError: files do not hold the rows that the log says; they were left as they are.
    """
    changes = zone.changes
    table = changes.table.load()
    if table is None:
        return RawMaintenanceReport()
    merged = sum(report.files_before for report in changes.compact(minimum_files, table))
    if merged:
        table.update_incremental()
    unsaved = changes.journal.unsaved_entries(table)
    if unsaved < minimum_log_entries:
        return RawMaintenanceReport(files_merged=merged)
    changes.journal.save(table)
    try:
        changes.table.shorten_log(table)
        journal = changes.journal.table.load()
        if journal is not None:
            changes.journal.table.shorten_log(journal)
    except (DeltaError, OSError) as error:
        raise _failed(changes.table, error) from error
    tables = (changes, zone.snapshots, zone.relations, zone.epochs, changes.journal)
    return RawMaintenanceReport(merged, unsaved, sum(_vacuum(part.table) for part in tables))


def _vacuum(table: RawTable) -> int:
    loaded = table.load()
    if loaded is None:
        return 0
    try:
        table.set_file_retention(loaded)
        return delete_old_files(table, loaded)
    except (DeltaError, OSError) as error:
        raise _failed(table, error) from error


def _failed(table: RawTable, error: Exception) -> TransientError:
    return TransientError(
        reason=f"The upkeep of {table.uri} failed: {first_line(error)} Nothing that is in use was "
        "removed; the next upkeep goes on with it."
    )
