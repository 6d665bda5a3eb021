"""Files of one Delta table that become those of another: what a rebuild does below the log."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow.fs as pafs

from pgcdc_assets.raw.files import filesystem
from pgcdc_assets.raw.zone import RawZone

_LOG = "_delta_log"


def move_files(zone: RawZone, names: Sequence[str], source: str, target: str) -> None:
    """Move data files between two tables of the capture; their names are unique."""
    store = _store(zone)
    for name in names:
        origin, destination = (f"{_inside(zone, folder)}/{name}" for folder in (source, target))
        if zone.lake.is_local:
            # Delta puts the files of a table with column mapping into folders of random names.
            store.create_dir(destination.rpartition("/")[0])
            store.move(origin, destination)
        else:
            store.copy_file(origin, destination)


def replace_log(zone: RawZone, source: str, target: str) -> None:
    """Put the log of another table in the place of a log that cannot be read.

    Copies of the old log's files stay beside it. Killed in between, the table is not there, and the
    next merge builds it from raw.
    """
    store = _store(zone)
    new, old = (f"{_inside(zone, folder)}/{_LOG}" for folder in (source, target))
    aside = f"{old}_damaged_{time.time_ns()}"
    for name in _file_names(store, old):
        store.copy_file(f"{old}/{name}", f"{aside}_{name}")
    # From the newest on: what is left stays a log that cannot be read.
    for name in reversed(_file_names(store, old)):
        store.delete_file(f"{old}/{name}")
    for name in _file_names(store, new):
        store.copy_file(f"{new}/{name}", f"{old}/{name}")


def _store(zone: RawZone) -> pafs.FileSystem:
    return filesystem(zone.lake, zone.lake.path(zone.name))


def _inside(zone: RawZone, path: str) -> str:
    return path.removeprefix(zone.lake.path(zone.name)).lstrip("/")


def _file_names(store: pafs.FileSystem, folder: str) -> list[str]:
    """List a folder's files in order; a log's entries are then in the order of their versions."""
    found = store.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    return sorted(entry.base_name for entry in found if entry.is_file)
