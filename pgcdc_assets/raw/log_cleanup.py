"""The retention of a raw table's files and log entries."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable

from pgcdc_assets.raw.delta_log import FOLDER, LAST_CHECKPOINT
from pgcdc_assets.raw.files import push_to_disk
from pgcdc_assets.raw.table import DELETED_FILE_RETENTION, RawTable


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


def shorten_log(raw: RawTable, table: DeltaTable) -> None:
    """Write a checkpoint, and remove the expired log entries before the checkpoint.

    Raises:
        DeltaError, OSError: the log could not be written.
    """
    table.create_checkpoint()
    if raw.lake.is_local:
        push_checkpoint_to_disk(Path(raw.uri), table.version())
    table.cleanup_metadata()


def push_checkpoint_to_disk(table: Path, version: int) -> None:
    """Push a checkpoint to the disk before the entries that it replaces are removed.

    A power failure must not lose both.
    """
    for entry in (table / FOLDER).glob(f"{version:020d}.checkpoint*"):
        push_to_disk(entry)
    push_to_disk(table / LAST_CHECKPOINT)
