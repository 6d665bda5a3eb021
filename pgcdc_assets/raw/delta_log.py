"""Open Delta tables and read their logs, by delta-rs and pyarrow."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from pgcdc_assets.raw.lake import Lake

FOLDER = "_delta_log"
# Names the newest checkpoint.
LAST_CHECKPOINT = f"{FOLDER}/_last_checkpoint"


class LogTable(DeltaTable):
    """A version of a table that reads each application transaction once.

    For each call delta-rs reads all log entries after the last checkpoint. In an object store each
    entry is a request.
    """

    def transaction_version(self, app_id: str) -> int | None:
        """Return the version of an application's last transaction; None without a transaction."""
        known = self.__dict__.setdefault("_known_transactions", {})
        key = self.version(), app_id
        if key not in known:
            known[key] = super().transaction_version(app_id)
        found: int | None = known[key]
        return found


def open_delta_table(lake: Lake, uri: str) -> DeltaTable | None:
    """Open the newest version of a Delta table; None if there is no table.

    Raises:
        DeltaError, OSError: the log cannot be read.
    """
    try:
        return LogTable(uri, storage_options=lake.delta_options)
    except TableNotFoundError:
        return None


def commit_path(version: int) -> str:
    """Return the path of a commit, relative to the table."""
    return f"{FOLDER}/{version:020d}.json"


def read_commit_lines(files: pafs.FileSystem, version: int) -> list[bytes]:
    """Read the actions of a commit, one JSON text each.

    Args:
        files: the file system whose root is the table's folder.

    Raises:
        FileNotFoundError: the log no longer has the commit.
        OSError: the commit cannot be read.
    """
    with files.open_input_stream(commit_path(version)) as commit:
        return [line for line in commit.read().splitlines() if line.strip()]


def read_commit(files: pafs.FileSystem, version: int) -> list[dict[str, Any]]:
    """Read the actions of a commit.

    Not by `DeltaTable.history`: that reads the newest log, whatever version is loaded, numbers the
    entries as if the loaded version were the newest, and refuses the statistics of a CLONE.

    Raises:
        FileNotFoundError: the log no longer has the commit.
        OSError, ValueError: the commit cannot be read.
    """
    return [json.loads(line) for line in read_commit_lines(files, version)]
