"""Putting rows of old files into new ones: what compaction and retention have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow.dataset as ds
from deltalake.transaction import RemoveAction

from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.raw.files import FileWriter
from pgcdc_assets.raw.row_groups import RelationGroups
from pgcdc_assets.raw.scan import DataFile, scan
from pgcdc_assets.raw.table import RawTable


def copy_rows(
    table: RawTable,
    files: Sequence[DataFile],
    writer: FileWriter,
    condition: ds.Expression | None = None,
) -> None:
    """Write the files' rows that meet the condition, sorted by source table.

    Raises:
        RawZoneError: a file is gone.
    """
    groups = RelationGroups()
    try:
        for batch in scan(table, files, table.schema.names, condition):
            for group in groups.add(batch):
                writer.write(group)
    except FileNotFoundError as error:
        raise RawZoneError(
            raw_zone=table.uri, reason="a file that its log names is gone; its rows are lost."
        ) from error
    for group in groups.drain():
        writer.write(group)


def removals(files: Sequence[DataFile]) -> list[RemoveAction]:
    """Describe, for a commit, files that leave the log although nothing changed at the source."""
    now = int(time.time() * 1000)
    return [
        RemoveAction(
            file.path,
            False,
            now,
            file.size_bytes,
            {name: str(value) for name, value in file.partition.items()},
        )
        for file in files
    ]
