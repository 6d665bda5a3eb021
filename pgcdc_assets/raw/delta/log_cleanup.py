"""The retention of a raw table's files and log entries."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable

from pgcdc_assets.raw.delta.files import push_to_disk
from pgcdc_assets.raw.delta.log_entries import FOLDER, LAST_CHECKPOINT
from pgcdc_assets.raw.delta.table import DELETED_FILE_RETENTION, RawTable
from pgcdc_assets.raw.lake import Lake


def set_file_retention(raw: RawTable, table: DeltaTable) -> None:
    """Set the file retention of new tables on a table of an earlier release.

    Raises:
        DeltaError, OSError: the log could not be written.
    """
    if table.metadata().configuration.get(DELETED_FILE_RETENTION) == raw.file_retention:
        return
    table.alter.set_table_properties({DELETED_FILE_RETENTION: raw.file_retention})
    if raw.lake.is_local:
        raw.push_log_to_disk(table.version())


def shorten_log(lake: Lake, path: str, table: DeltaTable) -> None:
    """Write a checkpoint, and remove the expired log entries before the checkpoint.

    delta-rs removes all expired entries before the newest checkpoint, also if a part of that
    checkpoint is missing or its file is empty. The checkpoint of this call is complete.

    Args:
        path: address of the table.

    Raises:
        DeltaError, OSError: the log could not be written.
    """
    table.create_checkpoint()
    if lake.is_local:
        # Before the removal: a power failure must not lose both the entries and the checkpoint.
        for entry in Path(path, FOLDER).glob(f"{table.version():020d}.checkpoint*"):
            push_to_disk(entry)
        push_to_disk(Path(path, LAST_CHECKPOINT))
    table.cleanup_metadata()
