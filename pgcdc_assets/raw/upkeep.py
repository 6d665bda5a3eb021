"""What keeps thousands of small windows cheap: fewer files, a short log, no orphans.

Opening a table lists its log, and each landing opens it twice. So the small files are merged, the
window records saved in `raw/windows`, the log's older entries removed after a checkpoint, and files
that no version of the last day names are deleted. All of it may run beside landings and readers.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.compaction import MINIMUM_FILES
from pgcdc_assets.raw.table import first_line
from pgcdc_assets.raw.zone import RawZone

MINIMUM_LOG_ENTRIES = 256


@dataclass(frozen=True)
class UpkeepReport:
    """What one upkeep did to `raw/changes`."""

    files_merged: int = 0
    log_entries_saved: int = 0
    files_removed: int = 0


def keep_up(
    zone: RawZone,
    *,
    minimum_files: int = MINIMUM_FILES,
    minimum_log_entries: int = MINIMUM_LOG_ENTRIES,
) -> UpkeepReport:
    """Do what is due; below both limits nothing is written.

    Raises:
        TransientError: the lake could not be written; the rows are safe, and the next upkeep goes
            on.
        RawZoneError: files do not hold the rows that the log says; they were left as they are.
    """
    changes = zone.changes
    table = changes.table.load()
    if table is None:
        return UpkeepReport()
    merged = sum(report.files_before for report in changes.compact(minimum_files, table))
    if merged:
        table.update_incremental()
    unsaved = changes.journal.unsaved_entries(table)
    if unsaved < minimum_log_entries:
        return UpkeepReport(files_merged=merged)
    changes.journal.save(table)
    try:
        table.create_checkpoint()
        table.cleanup_metadata()
        removed = table.vacuum(dry_run=False, full=True)
    except (DeltaError, OSError) as error:
        raise TransientError(
            reason=f"The upkeep of {changes.table.uri} failed: {first_line(error)} Nothing that is "
            "in use was removed; the next upkeep goes on with it."
        ) from error
    return UpkeepReport(merged, unsaved, len(removed))
