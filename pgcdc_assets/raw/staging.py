"""Temporary folders in the lake for tables under construction.

A folder's name begins with its creation time. A folder of a killed process is therefore recognised
without the modification times of an object store.
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

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.lake import Lake

# Longer than any comparison or rebuild: an older folder belongs to a killed process.
STALE_AFTER = dt.timedelta(days=2)

VERIFY = "verify"
REBUILD = "rebuild"

_TOKEN = re.compile(r"(\d{8}T\d{6})Z-[0-9a-f]{8}")
_TIME = "%Y%m%dT%H%M%S"

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def staging_root(lake: Lake, name: str, purpose: str) -> Iterator[str]:
    """Yield the path `<lake>/<name>/<purpose>/<token>`, and remove the folder after the block.

    The function does not create the folder: the first table below the path does.
    """
    now = dt.datetime.now(dt.UTC).strftime(_TIME)
    root = lake.path(name, purpose, f"{now}Z-{uuid.uuid4().hex[:8]}")
    try:
        yield root
    finally:
        _try_to_remove(lake, root)


def remove_stale(
    lake: Lake, name: str, older_than: dt.timedelta, purposes: Sequence[str] = (VERIFY, REBUILD)
) -> int:
    """Remove the temporary folders older than `older_than`, and return their number.

    A folder that cannot be removed, such as one of another user, stays with a warning.

    Raises:
        OSError: the lake cannot be listed.
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
                removed += _try_to_remove(lake, f"{folder}/{token}")
    return removed


def _try_to_remove(lake: Lake, uri: str) -> bool:
    try:
        remove_folder(lake, uri)
    except (OSError, DeltaError) as error:
        _logger.warning("%s was not removed (%s)", uri, type(error).__name__)
        return False
    return True


def remove_folder(lake: Lake, uri: str) -> None:
    """Remove a folder with its content, if the folder exists.

    Raises:
        OSError: a file could not be removed.
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
    """Return the names in a folder. In an object store, names are the parts before a slash."""
    store = filesystem(lake, folder)
    selector = pafs.FileSelector("", recursive=not lake.is_local, allow_not_found=True)
    return sorted({info.path.split("/")[0] for info in store.get_file_info(selector)})
