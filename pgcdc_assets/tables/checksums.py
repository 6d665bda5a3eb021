"""Checksums and drafts that Spark writes beside the files of a table, as files of their own.

Hadoop writes `.<name>.crc` beside each file of a local file system
(org.apache.hadoop.fs.ChecksumFileSystem), and refuses to read a file with another content. Delta
writes `<version>.crc` beside each log entry that Spark commits, in each store. delta-rs does not
know these files: it replaces and deletes other files without them.

Hadoop writes a log entry as `.<name>.<uuid>.tmp`, which has a checksum too, and renames it. If
Spark is killed, or the disk is full, the draft stays.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

import pyarrow.fs as pafs

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import FOLDER
from pgcdc_assets.raw.lake import Lake

_ENTRY = re.compile(r"(\d{20})\.json")
_CHECKSUM_OF_LOG = re.compile(r"\.?(\d{20})\..*crc")
_DRAFT_OF_LOG = re.compile(r"\.{1,2}\d{20}\..*\.tmp(?:\.crc)?")

# A file may be written beside its checksum.
_YOUNG_SECONDS = 3600.0


def checksum_path(path: str) -> str:
    """Return the path of the checksum that Hadoop writes beside a file."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.crc"


def delete_checksum(lake: Lake, files: pafs.FileSystem, path: str) -> None:
    """Delete the checksum of a file that is deleted, or that delta-rs replaces.

    Args:
        files: the file system whose root is the table's folder.
        path: of the file, relative to this folder.

    Raises:
        OSError: the checksum cannot be deleted.
    """
    if lake.is_local:
        with suppress(FileNotFoundError):
            files.delete_file(checksum_path(path))


def delete_checksums_of_log(lake: Lake, path: str) -> int:
    """Delete the checksums of versions before the oldest log entry, and return their number.

    Raises:
        OSError: the log cannot be listed, or a checksum cannot be deleted.
    """
    files = filesystem(lake, path)
    names = [info.base_name for info in files.get_file_info(pafs.FileSelector(FOLDER))]
    entries = (int(found[1]) for name in names if (found := _ENTRY.fullmatch(name)))
    oldest = min(entries, default=0)
    old = [
        name
        for name in names
        if (found := _CHECKSUM_OF_LOG.fullmatch(name)) and int(found[1]) < oldest
    ]
    for name in old:
        with suppress(FileNotFoundError):
            files.delete_file(f"{FOLDER}/{name}")
    return len(old)


def delete_drafts_of_log(path: str) -> int:
    """Delete the drafts of log entries and checkpoints that were not finished.

    Args:
        path: the folder of a table on this machine.

    Returns:
        Number of deleted files.

    Raises:
        OSError: the log cannot be listed, or a draft cannot be deleted.
    """
    before = time.time() - _YOUNG_SECONDS
    old = [
        file
        for file in Path(path, FOLDER).iterdir()
        if _DRAFT_OF_LOG.fullmatch(file.name) and file.stat().st_mtime < before
    ]
    for file in old:
        file.unlink(missing_ok=True)
    return len(old)


def delete_checksums_without_files(path: str) -> int:
    """Delete the checksums of deleted data files, and return their number.

    Args:
        path: the folder of a table on this machine.

    Raises:
        OSError: a checksum cannot be deleted.
    """
    before = time.time() - _YOUNG_SECONDS
    root, count = Path(path), 0
    for checksum in root.rglob(".*.crc"):
        if FOLDER in checksum.relative_to(root).parts:
            continue
        with suppress(FileNotFoundError):
            file = checksum.with_name(checksum.name.removeprefix(".").removesuffix(".crc"))
            if not file.exists() and checksum.stat().st_mtime < before:
                checksum.unlink()
                count += 1
    return count
