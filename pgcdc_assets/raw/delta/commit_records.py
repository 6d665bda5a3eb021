"""The records in the log entries of raw tables.

A process reads each log entry once. Otherwise each window would read the entries since the last
maintenance twice, and in an object store each entry is a request. Entries from before the last
maintenance are not asked for again, so they are forgotten: the record of a window has counts for
each changed table. An entry of a local lake is read again if its file has another time or size, as
after a restore from a backup. A person who restores a lake in an object store restarts the
processes that read the lake.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import commit_path, read_commit
from pgcdc_assets.raw.lake import Lake

# The key of a record in the `commitInfo` of a commit.
RECORD = "pgcdc"

_LOG_READERS = 8

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class LogEntry:
    """What is kept of a log entry.

    Attributes:
        records: the records of the commit.
        digest: number of 63 bits that identifies the content. Two commits of one version, as before
            and after a restore, have different times and file names.
    """

    records: Records
    digest: int


# Version, and in a local lake time and size of the file.
_Key = tuple[int, tuple[int, int] | None]

# By address and identifier of the table: the entries that were asked for last.
_KNOWN: dict[tuple[str, str], dict[_Key, LogEntry]] = {}
_MOST_TABLES = 64


def read_entries(lake: Lake, uri: str, table_id: str, versions: Iterable[int]) -> list[LogEntry]:
    """Return log entries, in the order of the versions.

    `DeltaTable.history` is unsuitable: it reads the newest log, whatever version is loaded, and
    numbers the entries from the loaded version.

    Args:
        table_id: the identifier in the table's metadata, which a new table at `uri` does not share.

    Raises:
        FileNotFoundError: a log entry was removed.
    """
    keys: list[_Key] = [
        (version, _time_and_size(uri, version) if lake.is_local else None) for version in versions
    ]
    known = _KNOWN.get((uri, table_id), {})
    found = {key: known[key] for key in keys if key in known}
    missing = [key for key in keys if key not in found]
    if missing:
        read = read_new_entries(lake, uri, [version for version, _ in missing])
        found |= zip(missing, read, strict=True)
    if len(_KNOWN) >= _MOST_TABLES:
        _KNOWN.clear()
    _KNOWN[uri, table_id] = found
    return [found[key] for key in keys]


def read_new_entries(lake: Lake, uri: str, versions: Iterable[int]) -> list[LogEntry]:
    """Return log entries, in the order of the versions, and keep nothing.

    Raises:
        FileNotFoundError: a log entry was removed.
    """
    files = filesystem(lake, uri)
    with ThreadPoolExecutor(_LOG_READERS) as readers:
        return list(readers.map(lambda version: _read(files, version), versions))


def _read(files: pafs.FileSystem, version: int) -> LogEntry:
    actions = read_commit(files, version)
    infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
    digest = blake2b(json.dumps(actions).encode(), digest_size=8).digest()
    # A version of an application transaction is not negative.
    number = int.from_bytes(digest, "big") >> 1
    return LogEntry([info[RECORD] for info in infos if RECORD in info], number)


def _time_and_size(uri: str, version: int) -> tuple[int, int]:
    status = os.stat(Path(uri, commit_path(version)))
    return status.st_mtime_ns, status.st_size
