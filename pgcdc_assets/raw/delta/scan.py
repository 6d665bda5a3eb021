"""Scans of the raw zone without a JVM.

The statistics in the Delta log select files, and the statistics in Parquet select row groups. Both
contain the commit LSN and the source table. A scan of one table or one window therefore reads
little more than the rows of this table or window.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pgcdc_assets.errors import ConfigurationError, RawZoneError, TransientError
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.table_name import TableName

_VECTORS = "deletionVectors"

# Row count, least and greatest values of files without statistics in the log, by table, file, size
# and columns. No program changes a file.
_READ: dict[tuple[str, str, int, tuple[str, ...]], tuple[int, dict[str, Any], dict[str, Any]]] = {}
_MOST_READ = 10_000


class UnreadableFile(RawZoneError):
    """A file that the log of a raw table names is missing or damaged."""


@dataclass(frozen=True)
class DataFile:
    """A data file of a table's version, from an add action of the log.

    Attributes:
        path: path relative to the table, as in the log.
        size_bytes: size of the file.
        row_count: number of rows; None if another program wrote the file without statistics.
        minimum: least value by column, for columns with statistics.
        maximum: greatest value by column, for columns with statistics.
        partition: values of the partition columns.
    """

    path: str
    size_bytes: int
    row_count: int | None
    minimum: Mapping[str, Any]
    maximum: Mapping[str, Any]
    partition: Mapping[str, Any]

    @property
    def stored_path(self) -> str:
        """The path in the store. The log encodes the characters of another program's folders."""
        return unquote(self.path)


def data_files(table: DeltaTable) -> list[DataFile]:
    """Return the data files of the loaded version.

    Raises:
        ConfigurationError: deletion vectors of another program hide rows of the files.
    """
    _check_no_hidden_rows(table)
    return [
        DataFile(
            row["path"],
            row["size_bytes"],
            row["num_records"],
            _known_values(row.get("min")),
            _known_values(row.get("max")),
            row.get("partition") or {},
        )
        for row in pa.table(table.get_add_actions()).to_pylist()
    ]


def _check_no_hidden_rows(table: DeltaTable) -> None:
    """Check that a table has no deletion vectors: scans read files, and compaction would keep rows.

    A person who has to delete personal data may turn on the feature, and delete rows then.
    """
    if _VECTORS not in (table.protocol().reader_features or ()):
        return
    if pa.table(table.deletion_vectors()).num_rows:
        name = f"delta.`{table.table_uri.rstrip('/')}`"
        raise ConfigurationError(
            reason=f"Another program has deleted rows of the Delta table {table.table_uri} by "
            "deletion vectors, which are not read here, so the rows would come back. Nothing was "
            f"read. Run in Spark: ALTER TABLE {name} SET TBLPROPERTIES "
            f"('delta.enableDeletionVectors' = 'false'); REORG TABLE {name} APPLY (PURGE)"
        )


def _known_values(values: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (values or {}).items() if value is not None}


def with_statistics(
    table: RawTable, files: Sequence[DataFile], columns: Sequence[str] = ()
) -> list[DataFile]:
    """Return the files with their row counts, and with least and greatest values of `columns`.

    Statistics that another program has left out are read from the file. A file without rows has no
    values.

    Raises:
        UnreadableFile: such a file is missing or damaged.
    """
    wanted, read = frozenset(columns), columns or table.statistics
    return [
        file if _has_statistics(file, wanted) else _read_statistics(table, file, read)
        for file in files
    ]


def count_rows(table: RawTable, files: Sequence[DataFile]) -> int:
    """Return the number of rows in the files."""
    return sum(file.row_count or 0 for file in with_statistics(table, files))


def _has_statistics(file: DataFile, columns: frozenset[str]) -> bool:
    if file.row_count is None:
        return False
    return not file.row_count or columns <= file.minimum.keys() & file.maximum.keys()


def _read_statistics(table: RawTable, file: DataFile, columns: Sequence[str]) -> DataFile:
    key = table.uri, file.path, file.size_bytes, tuple(columns)
    found = _READ.get(key)
    if found is None:
        found = _scan_statistics(table, file, columns)
        if len(_READ) >= _MOST_READ:
            _READ.clear()
        _READ[key] = found
    row_count, least, most = found
    return replace(
        file,
        row_count=row_count,
        minimum={**file.minimum, **least},
        maximum={**file.maximum, **most},
    )


def _scan_statistics(
    table: RawTable, file: DataFile, columns: Sequence[str]
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    row_count = 0
    for batch in scan(table, [file], columns):
        row_count += batch.num_rows
        for name in columns:
            found = pc.min_max(batch.column(name)).as_py()
            if found["min"] is not None:
                least[name] = min(found["min"], least.get(name, found["min"]))
                most[name] = max(found["max"], most.get(name, found["max"]))
    return row_count, least, most


def files_between(files: Sequence[DataFile], epoch: int, start: int, end: int) -> list[DataFile]:
    """Return the files that may contain changes of the epoch with start <= commit_lsn < end."""
    return [
        file
        for file in files
        if file.minimum.get("commit_lsn", start) < end
        and file.maximum.get("commit_lsn", start) >= start
        and file.minimum.get("epoch", epoch) <= epoch <= file.maximum.get("epoch", epoch)
    ]


@dataclass(frozen=True)
class ChangeFiles:
    """The files that may contain changes of an LSN range.

    Attributes:
        addresses: paths or URIs of Parquet files with all columns of `raw/changes`. A reader does
            not need the Delta log.
        are_inside: all changes in the files are inside the range, by the log's statistics.
    """

    addresses: tuple[str, ...]
    are_inside: bool


def change_files(
    table: RawTable, epoch: int, start: int, end: int, loaded: DeltaTable | None = None
) -> ChangeFiles:
    """Return the files of `raw/changes` that may contain changes of an LSN range of an epoch.

    Args:
        loaded: a version of the table; None: the newest one.
    """
    loaded = loaded or table.newest()
    files = [] if loaded is None else files_between(data_files(loaded), epoch, start, end)
    are_inside = all(
        file.minimum.get("commit_lsn", start - 1) >= start
        and file.maximum.get("commit_lsn", end) < end
        for file in files
    )
    return ChangeFiles(tuple(f"{table.uri}/{file.stored_path}" for file in files), are_inside)


def scan(
    table: RawTable,
    files: Sequence[DataFile],
    columns: Sequence[str],
    condition: pc.Expression | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the columns of the rows in `files` that satisfy `condition`.

    Raises:
        UnreadableFile: a file is missing or damaged.
    """
    if not files:
        return
    # Its import loads pandas, which would be a third of the start of a capture.
    import pyarrow.dataset as ds

    physical = pa.schema([f for f in table.schema if f.name not in table.partition_by])
    try:
        dataset = ds.dataset(
            [file.stored_path for file in files],
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
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        what = "missing" if isinstance(error, FileNotFoundError) else "damaged"
        raise UnreadableFile(
            raw_zone=table.uri,
            reason=f"a file of its log is {what}. Restore the file from a backup.",
        ) from error


def scan_changes(
    table: RawTable,
    *,
    epoch: int,
    start: int,
    end: int,
    names: Collection[TableName] | None = None,
    relation_id: int | None = None,
    relation_ids: Collection[int] | None = None,
    columns: Sequence[str] | None = None,
    condition: pc.Expression | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the changes of an epoch with start <= commit_lsn < end.

    The rows have no particular order. Sort by (commit_lsn, ordinal) for stream order.

    Args:
        table: `raw/changes`.
        epoch: the epoch.
        start: LSN, inclusive.
        end: LSN, exclusive.
        names: names of tables at the source; None: all tables.
        relation_id: OID of one table; None: all tables.
        relation_ids: OIDs of tables; None: all tables.
        columns: names of the columns to read; None: all columns.
        condition: a further condition; None: no condition.

    Raises:
        UnreadableFile: a file is missing or damaged.
        TransientError: another process has replaced and deleted a file.
    """
    loaded = table.newest()
    if loaded is None:
        return
    wanted = (
        (pc.field("epoch") == epoch)
        & (pc.field("commit_lsn") >= int(start))
        & (pc.field("commit_lsn") < int(end))
    )
    if condition is not None:
        wanted &= condition
    if names is not None:
        wanted &= reduce(
            operator.or_,
            (
                (pc.field("schema") == schema) & (pc.field("table") == name)
                for schema, name in names
            ),
        )
    if relation_id is not None:
        wanted &= pc.field("relation_id") == relation_id
    if relation_ids is not None:
        wanted &= pc.field("relation_id").isin(pa.array(sorted(relation_ids), pa.int64()))
    files = files_between(data_files(loaded), epoch, start, end)
    try:
        yield from scan(table, files, columns or table.schema.names, wanted)
    except UnreadableFile as error:
        newest = table.load()
        there = set() if newest is None else {file.path for file in data_files(newest)}
        if there.issuperset(file.path for file in files):
            raise
        raise TransientError(
            reason=f"Another process has replaced files of {table.uri}, and a VACUUM with a short "
            "retention has deleted them. Run it again."
        ) from error
