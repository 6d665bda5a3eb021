"""Deleting files that no recent version references, without touching a landing that is at work.

A file that no commit has ever named is an orphan, as a killed landing leaves it, or belongs to a
landing that has not committed yet. It is deleted once it is older than seven days, unless its
writer has renewed its mark since then. A file that a commit has replaced is known to be old: a day
is enough for readers that began before.

delta-rs lists the files, and the deleting is done here: its own VACUUM knows no marks, and adds two
commits to the log each time.
"""

from __future__ import annotations

import contextlib
import datetime as dt

import pyarrow.fs as pafs
from deltalake import DeltaTable

from pgcdc_assets.raw.files import WRITERS, filesystem, writer_of
from pgcdc_assets.raw.table import RawTable

ORPHAN_HOURS = 7 * 24
REPLACED_HOURS = 24


def delete_old_files(table: RawTable, loaded: DeltaTable) -> int:
    """Delete replaced files and orphans; return how many.

    Raises:
        DeltaError, OSError: the folder could not be read, or a file not deleted.
    """
    files = filesystem(table.lake, table.uri)
    replaced = _list_old(loaded, REPLACED_HOURS, is_full=False)
    orphans = _list_old(loaded, ORPHAN_HOURS, is_full=True) - replaced
    # The marks are read last: a writer whose files are listed above has made its mark before.
    at_work = _read_marks(files)
    deleted = 0
    for path in replaced | {path for path in orphans if writer_of(path) not in at_work}:
        with contextlib.suppress(FileNotFoundError):
            files.delete_file(path)
            deleted += 1
    return deleted


def _list_old(loaded: DeltaTable, hours: int, *, is_full: bool) -> set[str]:
    return set(
        loaded.vacuum(
            retention_hours=hours, dry_run=True, enforce_retention_duration=False, full=is_full
        )
    )


def _read_marks(files: pafs.FileSystem) -> set[str]:
    """Return the ids of the writers at work; delete the marks of those that are long gone."""
    oldest = dt.datetime.now(dt.UTC) - dt.timedelta(hours=ORPHAN_HOURS)
    at_work = set()
    for info in files.get_file_info(pafs.FileSelector(WRITERS, allow_not_found=True)):
        if info.mtime is None or info.mtime > oldest:
            at_work.add(info.base_name)
        else:
            with contextlib.suppress(FileNotFoundError):
                files.delete_file(info.path)
    return at_work
