"""Reading the raw zone without a JVM: for summaries, verification, status and tests.

Files are chosen by the log's statistics, row groups by Parquet's; both hold the commit LSN and the
source table, so that one table's or one window's rows cost about their own size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from pgcdc_assets.raw.files import filesystem
from pgcdc_assets.raw.table import RawTable
from pgcdc_assets.table_name import TableName


@dataclass(frozen=True)
class DataFile:
    """A live data file of a table, as the log describes it."""

    path: str
    size_bytes: int
    row_count: int
    minimum: Mapping[str, Any]
    maximum: Mapping[str, Any]
    partition: Mapping[str, Any]


def data_files(table: DeltaTable) -> list[DataFile]:
    """List the files of the loaded version."""
    return [
        DataFile(
            row["path"],
            row["size_bytes"],
            row["num_records"],
            row.get("min") or {},
            row.get("max") or {},
            row.get("partition") or {},
        )
        for row in pa.table(table.get_add_actions()).to_pylist()
    ]


def files_between(files: Sequence[DataFile], epoch: int, start: int, end: int) -> list[DataFile]:
    """Keep the files that may hold changes of the epoch with start <= commit_lsn < end."""
    return [
        file
        for file in files
        if file.minimum.get("commit_lsn", start) < end
        and file.maximum.get("commit_lsn", start) >= start
        and file.minimum.get("epoch", epoch) <= epoch <= file.maximum.get("epoch", epoch)
    ]


@dataclass(frozen=True)
class ChangeFiles:
    """The files that may hold changes of a range.

    Attributes:
        addresses: of plain Parquet files with every column of `raw/changes`; a reader that has them
            needs nothing of the log.
        lie_inside: the log says that no change in them lies outside of the range.
    """

    addresses: tuple[str, ...]
    lie_inside: bool


def change_files(table: RawTable, epoch: int, start: int, end: int) -> ChangeFiles:
    """Find the files that may hold changes of the epoch with start <= commit_lsn < end."""
    loaded = table.load()
    files = [] if loaded is None else files_between(data_files(loaded), epoch, start, end)
    lie_inside = all(
        file.minimum.get("commit_lsn", start - 1) >= start
        and file.maximum.get("commit_lsn", end) < end
        for file in files
    )
    return ChangeFiles(tuple(f"{table.uri}/{file.path}" for file in files), lie_inside)


def scan(
    table: RawTable,
    files: Sequence[DataFile],
    columns: Sequence[str],
    condition: ds.Expression | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read columns of the files' rows that meet the condition.

    Raises:
        FileNotFoundError: a file that the log names is gone.
    """
    if not files:
        return
    physical = pa.schema([f for f in table.schema if f.name not in table.partition_by])
    dataset = ds.dataset(
        [file.path for file in files],
        schema=physical,
        format=ds.ParquetFileFormat(),
        filesystem=filesystem(table.lake, table.uri),
    )
    scanner = dataset.scanner(
        columns=list(columns), filter=condition, use_threads=False, batch_readahead=1
    )
    for batch in scanner.to_batches():
        if batch.num_rows:
            yield batch


def read_changes(
    table: RawTable,
    *,
    epoch: int,
    start: int,
    end: int,
    source: TableName | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read the changes of an epoch with start <= commit_lsn < end, of one source table or of all.

    Rows come in no particular order; (commit_lsn, ordinal) is their order.
    """
    loaded = table.load()
    if loaded is None:
        return
    condition = (
        (pc.field("epoch") == epoch)
        & (pc.field("commit_lsn") >= int(start))
        & (pc.field("commit_lsn") < int(end))
    )
    if source is not None:
        condition &= (pc.field("schema") == source[0]) & (pc.field("table") == source[1])
    files = files_between(data_files(loaded), epoch, start, end)
    yield from scan(table, files, columns or table.schema.names, condition)
