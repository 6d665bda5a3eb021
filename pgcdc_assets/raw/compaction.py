"""Compaction: the rows of many small files are written into few, unchanged.

Rows keep their columns, `window` included, and the application transactions stay in the log, so
that a reader and a landing notice nothing. The commit names the files it replaces and changes no
data: a landing that commits meanwhile is not disturbed, and of two compactions one is refused. A
reader of an older version keeps the replaced files until VACUUM removes them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction

from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.raw.files import FileWriter
from pgcdc_assets.raw.row_groups import RelationGroups
from pgcdc_assets.raw.scan import DataFile, data_files, scan
from pgcdc_assets.raw.table import CommitRefused, RawTable

SMALL_FILE_BYTES = 32 * 1024 * 1024
TARGET_BYTES = 128 * 1024 * 1024
MINIMUM_FILES = 64


@dataclass(frozen=True)
class CompactionReport:
    """How many files became how many."""

    files_before: int
    files_after: int
    row_count: int


def compact(
    table: RawTable, loaded: DeltaTable, app_id: str, *, minimum_files: int
) -> list[CompactionReport]:
    """Merge neighbouring small files of `raw/changes`, sorted by source table inside.

    Args:
        app_id: application id of the compactions' own transactions.
        minimum_files: do nothing below this number of small files.

    Raises:
        RawZoneError: the files do not hold the rows that the log says.
    """
    small = [file for file in data_files(loaded) if file.size_bytes < SMALL_FILE_BYTES]
    if len(small) < minimum_files:
        return []
    reports = []
    for files in _neighbours(small):
        try:
            reports.append(_merge(table, loaded, app_id, files))
        except CommitRefused:
            # Another process compacts the same files: its work is as good as ours.
            break
        loaded = table.load_or_create()
    return reports


def _neighbours(small: Sequence[DataFile]) -> Iterator[list[DataFile]]:
    """Group files in stream order up to the target size, never over two epochs."""
    held: list[DataFile] = []
    for file in sorted(small, key=lambda f: (f.minimum["epoch"], f.minimum["commit_lsn"])):
        same_epoch = not held or held[0].minimum["epoch"] == file.minimum["epoch"]
        if not same_epoch or sum(f.size_bytes for f in held) + file.size_bytes > TARGET_BYTES:
            if len(held) > 1:
                yield held
            held = []
        held.append(file)
    if len(held) > 1:
        yield held


def _merge(
    table: RawTable, loaded: DeltaTable, app_id: str, files: Sequence[DataFile]
) -> CompactionReport:
    expected = sum(file.row_count for file in files)
    with table.writer() as writer:
        copy_rows(table, files, writer)
        merged = writer.finish()
        row_count = sum(file.row_count for file in merged)
        if row_count != expected:
            raise RawZoneError(
                raw_zone=table.uri,
                reason=f"{len(files)} files hold {row_count} rows, but the log says {expected}. "
                "The files were left as they are.",
            )
    table.commit(
        loaded,
        merged,
        removed=removals(files),
        app_id=app_id,
        app_version=loaded.version() + 1,
        record={"compacted_files": len(files), "row_count": row_count},
        data_change=False,
    )
    return CompactionReport(len(files), len(merged), row_count)


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
