"""Compaction: many small files of `raw/changes` are rewritten as few large files.

The rows do not change, and the application transactions stay in the log. The commit removes the
rewritten files with `dataChange = false`, so a concurrent landing does not conflict with the
compaction. Of two concurrent compactions one is refused. VACUUM deletes the rewritten files later;
until then a reader of an older version can read them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction

from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.raw.delta.files import FileWriter
from pgcdc_assets.raw.delta.row_groups import by_relation, gathered
from pgcdc_assets.raw.delta.scan import DataFile, count_rows, data_files, scan, with_statistics
from pgcdc_assets.raw.delta.table import CommitRefused, RawTable

SMALL_FILE_BYTES = 32 * 1024 * 1024
TARGET_BYTES = 128 * 1024 * 1024
MINIMUM_FILES = 64

_ORDER = ("epoch", "commit_lsn")

# Each window of a capture asks for a compaction, which reads up to the target size before it fails.
_PAUSE_SECONDS = 600.0

# By address of a table: the files that could not be compacted, and the time of the last failure by
# the monotonic clock.
_FAILED: dict[str, tuple[float, frozenset[str]]] = {}


@dataclass(frozen=True)
class CompactionReport:
    """The result of one compaction commit.

    Attributes:
        files_before: number of rewritten files.
        files_after: number of new files.
        row_count: number of rows in both.
    """

    files_before: int
    files_after: int
    row_count: int


def compact(
    table: RawTable, loaded: DeltaTable, app_id: str, *, minimum_files: int
) -> list[CompactionReport]:
    """Compact neighbouring small files of `raw/changes` or a table with its order of rows.

    Files that could not be compacted are left alone for some minutes.

    Args:
        table: a table with `epoch` and `commit_lsn`, and statistics of both. Statistics that
            another program has left out are read from its files.
        loaded: the newest version of the table.
        app_id: application id of compaction commits.
        minimum_files: do nothing with fewer small files.

    Raises:
        RawZoneError: the files do not contain the number of rows in the log.
    """
    failed = _failed_files(table.uri)
    small = [
        file
        for file in data_files(loaded)
        if file.size_bytes < SMALL_FILE_BYTES and file.path not in failed
    ]
    if len(small) < minimum_files:
        return []
    reports = []
    small = [file for file in with_statistics(table, small, _ORDER) if file.row_count]
    for files in _neighbours(small):
        try:
            reports.append(_merge(table, loaded, app_id, files))
        except CommitRefused:
            # Another process compacts the same files.
            break
        except Exception:
            failed = failed.union(file.path for file in files)
            _FAILED[table.uri] = (time.monotonic(), failed)
            raise
        loaded = table.load_or_create()
    return reports


def _failed_files(uri: str) -> frozenset[str]:
    failed_at, files = _FAILED.get(uri, (0.0, frozenset()))
    return files if time.monotonic() < failed_at + _PAUSE_SECONDS else frozenset()


def _neighbours(small: Sequence[DataFile]) -> Iterator[list[DataFile]]:
    """Yield groups of files in stream order up to the target size, each of one epoch."""
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
    expected = count_rows(table, files)
    with table.writer() as writer:
        copy_rows(table, files, writer)
        merged = writer.finish()
        row_count = sum(file.row_count for file in merged)
        if row_count != expected:
            raise RawZoneError(
                raw_zone=table.uri,
                reason=f"{len(files)} files contain {row_count} rows, but the log has {expected}: "
                "another program has changed them. They are left as they are. Restore them from a "
                "backup.",
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
    condition: pc.Expression | None = None,
) -> None:
    """Write the rows of `files` that satisfy `condition`, of `raw/changes` sorted by source table.

    Raises:
        RawZoneError: a file is missing or damaged.
    """
    batches = scan(table, files, table.schema.names, condition)
    has_relations = "relation_id" in table.schema.names
    for group in by_relation(batches) if has_relations else gathered(batches):
        writer.write(group)


def removals(files: Sequence[DataFile]) -> list[RemoveAction]:
    """Return the remove actions of files, with `dataChange = false`."""
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
