"""Uncompressed sizes of the raw zone's row groups, from the Parquet footers.

A row group of changes contains rows of one relation or of several small relations
(`row_groups.py`), and its statistics bound the tables. The Delta log has the compressed size of
whole files only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow.parquet as pq

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.scan import data_files, files_between
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.table_name import TableName

_PLACES = ("schema", "table", "commit_lsn")


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file.

    Attributes:
        schemas: least and greatest schema name.
        tables: least and greatest table name.
        lsns: least and greatest commit LSN.
        size_bytes: uncompressed size.
        row_count: number of changes of all tables.
    """

    schemas: tuple[str, str]
    tables: tuple[str, str]
    lsns: tuple[int, int]
    size_bytes: int
    row_count: int

    def may_hold(self, name: TableName) -> bool:
        """Return whether the row group may contain changes of a table."""
        return (
            self.schemas[0] <= name.schema <= self.schemas[1]
            and self.tables[0] <= name.table <= self.tables[1]
        )


@dataclass
class RowGroups:
    """Reader of Parquet footers, which reads each file once.

    Attributes:
        table: `raw/changes`.
    """

    table: RawTable
    _known: dict[str, list[RowGroup]] = field(default_factory=dict)

    def between(self, epoch: int, start: int, end: int) -> Sequence[RowGroup]:
        """Return the row groups that may contain changes of an LSN range of an epoch.

        Unreadable files are skipped: the later read of their rows raises the error.
        """
        loaded = self.table.newest()
        files = [] if loaded is None else files_between(data_files(loaded), epoch, start, end)
        groups = [group for file in files for group in self._of(file.path)]
        return [group for group in groups if group.lsns[0] < end and group.lsns[1] >= start]

    def _of(self, path: str) -> list[RowGroup]:
        if path not in self._known:
            self._known[path] = self._read(path)
        return self._known[path]

    def _read(self, path: str) -> list[RowGroup]:
        footer = _footer(self.table, path)
        if footer is None:
            return []
        names = footer.schema.names
        at = [names.index(name) for name in _PLACES]
        groups = []
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            found = [group.column(index).statistics for index in at]
            if all(statistics is not None and statistics.has_min_max for statistics in found):
                schemas, tables, lsns = ((s.min, s.max) for s in found)
                groups.append(
                    RowGroup(schemas, tables, lsns, group.total_byte_size, group.num_rows)
                )
        return groups


def uncompressed_bytes(table: RawTable, paths: Iterable[str]) -> int:
    """Return the uncompressed size of the files. Unreadable files count as empty."""
    footers = [_footer(table, path) for path in paths]
    return sum(
        footer.row_group(number).total_byte_size
        for footer in footers
        if footer is not None
        for number in range(footer.num_row_groups)
    )


def _footer(table: RawTable, path: str) -> pq.FileMetaData | None:
    try:
        with pq.ParquetFile(path, filesystem=filesystem(table.lake, table.uri)) as file:
            return file.metadata
    except OSError:
        return None
