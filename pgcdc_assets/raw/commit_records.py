"""The records in the log entries of raw tables.

A process reads each log entry once: each window reads the entries since the last maintenance twice,
and in an object store each entry is a request. Entries from before the last maintenance are not
asked for again, so they are forgotten: the record of a window has counts for each changed table. An
entry of a local lake is read again if its file has another time or size, as after a restore from a
backup. A person who restores a lake in an object store restarts the processes that read the lake.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pgcdc_assets.raw.delta_log import commit_path, read_commit
from pgcdc_assets.raw.files import filesystem
from pgcdc_assets.raw.lake import Lake

# The key of a record in the `commitInfo` of a commit.
RECORD = "pgcdc"

_LOG_READERS = 8

Records = list[dict[str, Any]]

# Version, and in a local lake time and size of the file.
_Entry = tuple[int, tuple[int, int] | None]

# By address and identifier of the table: the records that were asked for last.
_KNOWN: dict[tuple[str, str], dict[_Entry, Records]] = {}
_MOST_TABLES = 64


def read_records(lake: Lake, uri: str, table_id: str, versions: Iterable[int]) -> Records:
    """Return the records of commits, in the order of the versions.

    `DeltaTable.history` is unsuitable: it reads the newest log, whatever version is loaded, and
    numbers the entries from the loaded version.

    Args:
        table_id: the identifier in the table's metadata, which a new table at `uri` does not share.

    Raises:
        FileNotFoundError: a log entry was removed.
    """
    entries: list[_Entry] = [
        (version, _time_and_size(uri, version) if lake.is_local else None) for version in versions
    ]
    known = _KNOWN.get((uri, table_id), {})
    found = {entry: known[entry] for entry in entries if entry in known}
    missing = [entry for entry in entries if entry not in found]
    if missing:
        files = filesystem(lake, uri)

        def read(entry: _Entry) -> Records:
            actions = read_commit(files, entry[0])
            infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
            return [info[RECORD] for info in infos if RECORD in info]

        with ThreadPoolExecutor(_LOG_READERS) as readers:
            found |= zip(missing, readers.map(read, missing), strict=True)
    if len(_KNOWN) >= _MOST_TABLES:
        _KNOWN.clear()
    _KNOWN[uri, table_id] = found
    return [record for entry in entries for record in found[entry]]


def _time_and_size(uri: str, version: int) -> tuple[int, int]:
    status = os.stat(Path(uri, commit_path(version)))
    return status.st_mtime_ns, status.st_size
