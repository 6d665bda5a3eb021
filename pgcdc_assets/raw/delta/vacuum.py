"""Deletion of files that no recent version references, without an effect on running landings.

A file without a commit is either an orphan of a killed landing, or belongs to a running landing.
Such a file is deleted if the file is older than seven days and its writer has not renewed its mark
within seven days. A file that a commit has replaced is deleted after one day, which is enough for
running readers. The files of the ranges of incomplete snapshots (`ranges.py`) are never deleted.

delta-rs lists the files, and this module deletes the files. VACUUM of delta-rs ignores the marks,
and adds two commits to the log.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Collection

import pyarrow.fs as pafs
from deltalake import DeltaTable

from pgcdc_assets.raw.delta.files import WRITERS, filesystem, writer_of
from pgcdc_assets.raw.delta.table import RawTable

ORPHAN_HOURS = 7 * 24
REPLACED_HOURS = 24


def delete_old_files(table: RawTable, loaded: DeltaTable, spared: Collection[str] = ()) -> int:
    """Delete replaced files and orphans, and return their number.

    Args:
        spared: paths of files without a commit that a later commit may add. Read them before the
            table is loaded: a commit may come in between.

    Raises:
        DeltaError, OSError: the folder could not be read, or a file could not be deleted.
    """
    files = filesystem(table.lake, table.uri)
    replaced = _list_old(loaded, REPLACED_HOURS, is_full=False)
    orphans = _list_old(loaded, ORPHAN_HOURS, is_full=True) - replaced - set(spared)
    # Read the marks after the listing: the writer of a listed old file has written its mark before.
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
    """Return the ids of the running writers, and delete the marks of ended writers."""
    oldest = dt.datetime.now(dt.UTC) - dt.timedelta(hours=ORPHAN_HOURS)
    at_work = set()
    for info in files.get_file_info(pafs.FileSelector(WRITERS, allow_not_found=True)):
        if info.mtime is None or info.mtime > oldest:
            at_work.add(info.base_name)
        else:
            with contextlib.suppress(FileNotFoundError):
                files.delete_file(info.path)
    return at_work
