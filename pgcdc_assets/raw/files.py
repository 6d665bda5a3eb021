"""Parquet data files of the raw zone, written by pyarrow, one row group per call.

Written here and not by delta-rs because the caller decides what a row group holds: `row_groups.py`
gives each group to one source table, so that a reader of one table of a hundred skips the other
ninety-nine by the groups' statistics. Measured in docs/decisions/0002-raw-zone-by-delta-rs.md.
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
from deltalake.fs import DeltaStorageHandler

from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.lake import Lake

TARGET_FILE_BYTES = 256 * 1024 * 1024

# Hidden from readers and from VACUUM, as all names that begin so are.
WRITERS = "_writers"
_MARK_SECONDS = 3600.0

COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1

# Few distinct values per row group: worth a dictionary. The tuples' texts are not.
_DICTIONARY_COLUMNS = frozenset(
    "epoch window commit_lsn xid commit_ts origin op relation_id relation_version schema table "
    "old_kind chunk".split()
)


@dataclass(frozen=True)
class WrittenFile:
    """A finished data file that no commit names yet.

    Attributes:
        path: relative to the table.
        statistics: Delta's per-file statistics: numRecords, minValues, maxValues, nullCount.
    """

    path: str
    size_bytes: int
    row_count: int
    statistics: Mapping[str, Any]
    partition_values: Mapping[str, str] = field(default_factory=dict)


def filesystem(lake: Lake, uri: str) -> pafs.FileSystem:
    """Give the Arrow file system whose root is the table's folder."""
    if lake.is_local:
        return pafs.SubTreeFileSystem(uri, pafs.LocalFileSystem())
    return pafs.PyFileSystem(DeltaStorageHandler(uri, dict(lake.storage_options)))


def write_file(files: pafs.FileSystem, path: str, content: bytes) -> None:
    """Write a small file; one that is there is replaced.

    Raises:
        OSError: it cannot be written.
    """
    # delta-rs takes bytes alone, and that is what a buffer gives on which holds all of them.
    with files.open_output_stream(path, buffer_size=len(content) + 1) as target:
        target.write(content)


def writer_of(path: str) -> str:
    """Return the id of the writer that a data file's name begins with."""
    return path.removeprefix("part-").partition("-")[0].removesuffix(".parquet")


class FileWriter:
    """Writes row groups into files of a limited size; as a context, removes them on an error.

    A writer that is open for an hour marks itself below `_writers`, and renews the mark each hour:
    its files are not taken for orphans, however old the first of them are (`vacuum.py`).

    Args:
        partition_values: the values of the table's partition columns, which the files do not hold.
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
        """Close the last file and push all of them to the disk.

        Args:
            at_least_one_file: write a file without rows where there were none.

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

    def discard(self) -> None:
        """Remove what was written; what cannot be removed is an orphan that upkeep removes."""
        paths = [file.path for file in self._files]
        if self._writer is not None:
            paths.append(self._path)
            with contextlib.suppress(OSError):
                self._writer.close()
            with contextlib.suppress(OSError):
                self._sink.close()
            self._writer = None
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
        self._writer = None
        if self._lake.is_local:
            push_to_disk(Path(self._uri, self._path))
        self._files.append(
            WrittenFile(
                self._path,
                size_bytes,
                self._statistics.row_count,
                self._statistics.as_delta(),
                self._partition_values,
            )
        )

    def _unwritable(self, error: OSError) -> TransientError:
        return TransientError(
            reason=f"The lake folder {self._uri} cannot be written ({error.strerror or error}). "
            "Nothing was committed; make space or make it writable, then run it again."
        )


class _Statistics:
    """Row count, minimum, maximum and null count of the chosen columns over one file."""

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
    """Return once a local file and its name would survive a power cut."""
    for name in (path, path.parent):
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
