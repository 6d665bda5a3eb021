"""The records in the log entries of raw tables.

In an object store each log entry is a request, so a process reads each entry once. A person who
restores a lake there from a backup restarts the processes that read the lake.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pgcdc_assets.raw.delta_log import read_commit
from pgcdc_assets.raw.files import filesystem
from pgcdc_assets.raw.lake import Lake

# The key of a record in the `commitInfo` of a commit.
RECORD = "pgcdc"

_LOG_READERS = 8

Records = list[dict[str, Any]]

# By address, identifier of the table and version.
_KNOWN: dict[tuple[str, str, int], Records] = {}
_MOST_KNOWN = 20_000


def read_records(lake: Lake, uri: str, table_id: str, versions: Iterable[int]) -> Records:
    """Return the records of commits, in the order of the versions.

    `DeltaTable.history` is unsuitable: it reads the newest log, whatever version is loaded, and
    numbers the entries from the loaded version.

    Args:
        table_id: the identifier in the table's metadata, which a new table at `uri` does not share.

    Raises:
        FileNotFoundError: a log entry was removed.
    """
    files = filesystem(lake, uri)

    def read(version: int) -> Records:
        key = uri, table_id, version
        known = None if lake.is_local else _KNOWN.get(key)
        if known is None:
            actions = read_commit(files, version)
            infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
            known = [info[RECORD] for info in infos if RECORD in info]
            if not lake.is_local:
                if len(_KNOWN) >= _MOST_KNOWN:
                    _KNOWN.clear()
                _KNOWN[key] = known
        return known

    with ThreadPoolExecutor(_LOG_READERS) as readers:
        return [record for records in readers.map(read, versions) for record in records]
