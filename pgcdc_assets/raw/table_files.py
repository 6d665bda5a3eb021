"""Moving of data files between Delta tables, and of damaged logs, for a rebuild."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import pyarrow.fs as pafs

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import FOLDER, SET_ASIDE
from pgcdc_assets.raw.zone import RawZone

# S3 itself copies objects of up to 5 GB (CopyObject).
LARGEST_COPY_BYTES = 5_000_000_000
_BLOCK_BYTES = 64 * 1024 * 1024


def move_files(zone: RawZone, sizes: Mapping[str, int], source: str, target: str) -> None:
    """Move data files, which have unique names, between two tables of the capture.

    Args:
        sizes: the size of each file in bytes.

    Raises:
        OSError: a file cannot be read or written.
    """
    store = _store(zone)
    for name, size_bytes in sizes.items():
        origin, destination = (f"{_inside(zone, folder)}/{name}" for folder in (source, target))
        if zone.lake.is_local:
            # Delta puts the files of a table with column mapping into folders of random names.
            store.create_dir(destination.rpartition("/")[0])
            store.move(origin, destination)
        elif zone.lake.is_s3 and size_bytes > LARGEST_COPY_BYTES:
            _copy_by_blocks(store, origin, destination)
        else:
            store.copy_file(origin, destination)


def set_log_aside(zone: RawZone, path: str) -> None:
    """Copy the files of a table's log to the folder beside the log, and delete the log.

    Raises:
        OSError: a file cannot be copied or deleted.
    """
    store = _store(zone)
    log = f"{_inside(zone, path)}/{FOLDER}"
    names = _file_names(store, log)
    aside = f"{_inside(zone, path)}/{SET_ASIDE}{time.time_ns()}"
    copies: list[str] = []
    try:
        for name in names:
            copies.append(f"{aside}_{name}")
            store.copy_file(f"{log}/{name}", copies[-1])
    except OSError:
        # On a full disk each attempt would leave copies.
        for copy in copies:
            with suppress(OSError):
                store.delete_file(copy)
        raise
    # The oldest entry first: the remaining entries never form a readable log of an older version.
    for name in names:
        store.delete_file(f"{log}/{name}")


def _copy_by_blocks(store: pafs.FileSystem, source: str, target: str) -> None:
    """Read and write a file through this process."""
    with store.open_input_stream(source) as origin, store.open_output_stream(target) as destination:
        while block := origin.read(_BLOCK_BYTES):
            destination.write(block)


def _store(zone: RawZone) -> pafs.FileSystem:
    return filesystem(zone.lake, zone.lake.path(zone.name))


def _inside(zone: RawZone, path: str) -> str:
    return path.removeprefix(zone.lake.path(zone.name)).lstrip("/")


def _file_names(store: pafs.FileSystem, folder: str) -> list[str]:
    """Return the file names of a folder in text order, which is version order in a log."""
    found = store.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    return sorted(entry.base_name for entry in found if entry.is_file)
