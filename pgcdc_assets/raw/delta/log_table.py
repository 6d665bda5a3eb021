"""Open Delta tables by delta-rs."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import FOLDER, LAST_CHECKPOINT, hinted_checkpoint
from pgcdc_assets.raw.delta.log_tail import transactions_at
from pgcdc_assets.raw.lake import Lake

# A part of a checkpoint, with the number of all parts.
_PART = re.compile(r"\d{20}\.checkpoint\.\d{10}\.(\d{10})\.parquet")


class LogTable(DeltaTable):
    """A version of a table that reads each application transaction once.

    For each call delta-rs reads all log entries after the last checkpoint.
    """

    def __init__(self, lake: Lake, uri: str) -> None:
        super().__init__(uri, storage_options=lake.delta_options)
        self._lake, self._uri = lake, uri
        self._transactions: dict[str, int | None] = {}
        self._transactions_version = -1

    def transaction_version(self, app_id: str) -> int | None:
        """Return the version of an application's last transaction; None without a transaction."""
        version = self.version()
        if version != self._transactions_version:
            self._transactions = transactions_at(self._lake, self._uri, version)
            self._transactions_version = version
        if app_id not in self._transactions:
            self._transactions[app_id] = super().transaction_version(app_id)
        return self._transactions[app_id]


def open_delta_table(lake: Lake, uri: str) -> DeltaTable | None:
    """Open the newest version of a Delta table; None if there is no table.

    Raises:
        DeltaError, OSError: the log cannot be read.
    """
    try:
        return LogTable(lake, uri)
    except TableNotFoundError:
        return None
    except DeltaError:
        if not _remove_wrong_hint(lake, uri):
            raise
        return open_delta_table(lake, uri)


def _remove_wrong_hint(lake: Lake, uri: str) -> bool:
    """Remove `_last_checkpoint` if the log lacks that checkpoint, and can be read without it.

    Delta reads the file as a hint, which may be wrong: the files of a backup are copied one after
    another, and a failure of the power leaves an empty checkpoint. delta-rs opens no table whose
    hint is ahead of its checkpoints.

    Returns:
        Whether the file was removed.
    """
    files = filesystem(lake, uri)
    try:
        version = hinted_checkpoint(files)
        if version is None:
            return False
        found = files.get_file_info(pafs.FileSelector(FOLDER))
        names = [info.base_name for info in found if info.size]
        begins = any(".checkpoint." in name or name == f"{0:020d}.json" for name in names)
        if not begins or _has_checkpoint(names, version):
            return False
        files.delete_file(LAST_CHECKPOINT)
    except (OSError, ValueError):
        return False
    return True


def _has_checkpoint(names: Iterable[str], version: int) -> bool:
    """Return whether a log has a checkpoint of a version, in one file or with all its parts.

    Args:
        names: of the files of the log that are not empty.
    """
    own = [name for name in names if name.startswith(f"{version:020d}.checkpoint.")]
    parts = [int(found[1]) for name in own if (found := _PART.fullmatch(name))]
    return len(own) > len(parts) or any(parts.count(number) == number for number in parts)
