"""Parquet data files of the raw zone, written by pyarrow with one row group per call.

pyarrow writes the files instead of delta-rs, because the caller determines the content of a row
group: `row_groups.py` fills a row group with rows of one source table. A reader of one table of a
hundred therefore skips the row groups of the other tables by their statistics. Measurements:
docs/decisions/0002-raw-zone-by-delta-rs.md.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.object_store import object_store
from pgcdc_assets.raw.store_errors import explain_store_error

TARGET_FILE_BYTES = 256 * 1024 * 1024

# Folder of the writers' marks. Readers and VACUUM ignore names that begin with an underscore.
WRITERS = "_writers"
_MARK_SECONDS = 3600.0

COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1

# Columns with few distinct values per row group, worth a dictionary.
_DICTIONARY_COLUMNS = frozenset(
    "epoch window commit_lsn xid commit_ts origin op relation_id relation_version schema table "
    "old_kind chunk".split()
)


@dataclass(frozen=True)
class WrittenFile:
    """A finished data file that is not committed yet.

    Attributes:
        path: path relative to the table.
        size_bytes: size of the file.
        row_count: number of rows.
        statistics: Delta's per-file statistics: numRecords, minValues, maxValues, nullCount.
        partition_values: values of the partition columns, as text.
    """

    path: str
    size_bytes: int
    row_count: int
    statistics: Mapping[str, Any]
    partition_values: Mapping[str, str] = field(default_factory=dict)


def filesystem(lake: Lake, uri: str) -> pafs.FileSystem:
    """Return an Arrow file system whose root is the folder `uri`."""
    if lake.is_local:
        return pafs.SubTreeFileSystem(uri, pafs.LocalFileSystem())
    return object_store(lake, uri)


def write_file(files: pafs.FileSystem, path: str, content: bytes) -> None:
    """Write a small file, and replace an existing file.

    Raises:
        OSError: the file cannot be written.
    """
    # delta-rs accepts bytes only. A buffer that holds the whole content passes on bytes.
    with files.open_output_stream(path, buffer_size=len(content) + 1) as target:
        target.write(content)


def writer_of(path: str) -> str:
    """Return the writer's id in the name of a data file."""
    return path.removeprefix("part-").partition("-")[0].removesuffix(".parquet")


class FileWriter:
    """Writer of row groups to files of limited size. As a context manager, remove files on error.

    A writer that is open for an hour writes a mark below `_writers`, and renews the mark every
    hour. `vacuum.py` does not delete the files of a writer with a recent mark as orphans.

    Args:
        lake: the lake.
        uri: folder of the table.
        schema: columns of the table.
        partition_by: partition columns, which the files do not contain.
        statistics: columns with minimum and maximum in the log.
        partition_values: values of the partition columns, as text.
        target_file_bytes: size at which the writer begins a new file.
    """

    def __init__(
        self,
        lake: Lake,
        uri: str,
        schema: pa.Schema,
        partition_by: Iterable[str] = (),
        statistics: Iterable[str] = (),
        *,
        partition_values: Mapping[str, str] | None = None,
        target_file_bytes: int = TARGET_FILE_BYTES,
    ) -> None:
        self._lake = lake
        self._uri = uri
        self._schema = pa.schema([f for f in schema if f.name not in set(partition_by)])
        self._statistics_columns = [n for n in statistics if n in self._schema.names]
        self._partition_values = dict(partition_values or {})
        self._target_file_bytes = target_file_bytes
        self._id = uuid.uuid4().hex
        self._marked_at = time.monotonic()
        self._has_mark = False
        self._files: list[WrittenFile] = []
        self._path = ""
        self._sink: Any = None
        self._writer: pq.ParquetWriter | None = None
        self._statistics = _Statistics(self._statistics_columns)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is not None:
            self.discard()

    def write(self, rows: pa.Table) -> None:
        """Write the rows as one row group.

        Raises:
            TransientError: the file cannot be written.
        """
        if rows.num_rows == 0:
            return
        try:
            if self._writer is None:
                self._open()
            assert self._writer is not None
            if time.monotonic() - self._marked_at >= _MARK_SECONDS:
                self._mark()
            self._writer.write_table(rows, row_group_size=rows.num_rows)
            self._statistics.add(rows)
            if self._sink.tell() >= self._target_file_bytes:
                self._close()
        except OSError as error:
            raise self._unwritable(error) from error

    def finish(self, *, at_least_one_file: bool = False) -> list[WrittenFile]:
        """Close the last file, and return all files. Local files are synchronised to the disk.

        Args:
            at_least_one_file: write a file without rows if there were no rows.

        Raises:
            TransientError: a file cannot be written.
        """
        try:
            if self._writer is None and at_least_one_file and not self._files:
                self._open()
            self._close()
        except OSError as error:
            raise self._unwritable(error) from error
        return self._files

    @property
    def paths(self) -> list[str]:
        """Paths of the finished files."""
        return [file.path for file in self._files]

    def discard(self) -> None:
        """Remove all written files. Maintenance removes files that cannot be removed now."""
        paths = [file.path for file in self._files]
        if self._sink is not None:
            paths.append(self._path)
            for each in (self._writer, self._sink):
                with contextlib.suppress(OSError):
                    if each is not None:
                        each.close()
            self._writer = self._sink = None
        if self._has_mark:
            paths.append(f"{WRITERS}/{self._id}")
        for path in paths:
            with contextlib.suppress(OSError):
                filesystem(self._lake, self._uri).delete_file(path)
        self._files = []

    def _mark(self) -> None:
        files = filesystem(self._lake, self._uri)
        files.create_dir(WRITERS, recursive=True)
        write_file(files, f"{WRITERS}/{self._id}", b"at work")
        self._marked_at = time.monotonic()
        self._has_mark = True

    def _open(self) -> None:
        self._path = f"part-{self._id}-{len(self._files):05d}.parquet"
        self._statistics = _Statistics(self._statistics_columns)
        self._sink = filesystem(self._lake, self._uri).open_output_stream(self._path)
        names = [
            f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in self._schema
        ]
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=[n for n in names if n in _DICTIONARY_COLUMNS],
            write_statistics=[n for n in names if not n.endswith(".element")],
            store_schema=False,
            version="2.6",
        )

    def _close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        size_bytes = self._sink.tell()
        self._sink.close()
        if self._lake.is_local:
            push_to_disk(Path(self._uri, self._path))
        # Until here, `discard` removes the file.
        self._writer = self._sink = None
        self._files.append(
            WrittenFile(
                self._path,
                size_bytes,
                self._statistics.row_count,
                self._statistics.as_delta(),
                self._partition_values,
            )
        )

    def _unwritable(self, error: OSError) -> PgcdcError:
        return explain_store_error(self._uri, error) or TransientError(
            reason=f"The lake folder {self._uri} cannot be written ({error.strerror or error}). "
            "Nothing was committed. Free space or make the folder writable, then run it again."
        )


class _Statistics:
    """Row count, and minimum, maximum and null count per column, of one file."""

    def __init__(self, columns: list[str]) -> None:
        self.row_count = 0
        self._columns = columns
        self._minimum: dict[str, Any] = {}
        self._maximum: dict[str, Any] = {}
        self._null_count = dict.fromkeys(columns, 0)

    def add(self, rows: pa.Table) -> None:
        self.row_count += rows.num_rows
        for name in self._columns:
            column = rows.column(name)
            self._null_count[name] += column.null_count
            found = pc.min_max(column).as_py()
            if found["min"] is not None:
                self._minimum[name] = min(found["min"], self._minimum.get(name, found["min"]))
                self._maximum[name] = max(found["max"], self._maximum.get(name, found["max"]))

    def as_delta(self) -> dict[str, Any]:
        return {
            "numRecords": self.row_count,
            "minValues": self._minimum,
            "maxValues": self._maximum,
            "nullCount": self._null_count,
        }


def push_to_disk(path: Path) -> None:
    """Synchronise a local file and its folder to the disk by fsync."""
    for name in (path, path.parent):
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
