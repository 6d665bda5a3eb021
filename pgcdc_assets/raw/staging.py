"""Folders of the lake that hold a table while it is being built, and go when that is done.

A folder's name begins with the time it was made at, so that what a killed process left behind is
known on any store, whose clocks and modification times need not be asked.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence

import pyarrow.fs as pafs
from deltalake.exceptions import DeltaError

from pgcdc_assets.raw.files import filesystem
from pgcdc_assets.raw.lake import Lake

# Longer than any comparison or rebuild takes: what is older was left behind by a killed process.
STALE_AFTER = dt.timedelta(days=2)

VERIFY = "verify"
REBUILD = "rebuild"

_TOKEN = re.compile(r"(\d{8}T\d{6})Z-[0-9a-f]{8}")
_TIME = "%Y%m%dT%H%M%S"

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def staging_root(lake: Lake, name: str, purpose: str) -> Iterator[str]:
    """Name a folder `<lake>/<name>/<purpose>/<token>`; it is removed at the end, whatever happens.

    Nothing is made: whoever writes the first table below makes it.
    """
    now = dt.datetime.now(dt.UTC).strftime(_TIME)
    root = lake.path(name, purpose, f"{now}Z-{uuid.uuid4().hex[:8]}")
    try:
        yield root
    finally:
        try:
            remove_folder(lake, root)
        except (OSError, DeltaError) as error:
            _logger.warning("%s was not removed (%s)", root, type(error).__name__)


def remove_stale(
    lake: Lake, name: str, older_than: dt.timedelta, purposes: Sequence[str] = (VERIFY, REBUILD)
) -> int:
    """Remove the folders that were made longer ago than that; return how many.

    Raises:
        OSError: the lake cannot be read or written.
    """
    limit = dt.datetime.now(dt.UTC) - older_than
    removed = 0
    for purpose in purposes:
        folder = lake.path(name, purpose)
        for token in _tokens(lake, folder):
            match = _TOKEN.fullmatch(token)
            if match is None:
                continue
            made = dt.datetime.strptime(match[1], _TIME).replace(tzinfo=dt.UTC)
            if made < limit:
                remove_folder(lake, f"{folder}/{token}")
                removed += 1
    return removed


def remove_folder(lake: Lake, uri: str) -> None:
    """Remove a folder with all that is in it; none is fine.

    Raises:
        OSError: something could not be removed.
    """
    if lake.is_local:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(uri)
        return
    store = filesystem(lake, uri)
    for info in store.get_file_info(pafs.FileSelector("", recursive=True, allow_not_found=True)):
        if info.type == pafs.FileType.File:
            store.delete_file(info.path)


def _tokens(lake: Lake, folder: str) -> list[str]:
    """List the folder's entries; object stores have no folders, only names with slashes."""
    store = filesystem(lake, folder)
    selector = pafs.FileSelector("", recursive=not lake.is_local, allow_not_found=True)
    return sorted({info.path.split("/")[0] for info in store.get_file_info(selector)})
