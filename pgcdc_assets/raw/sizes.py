"""How many bytes the row groups of the raw zone hold, by the footers of their files.

A row group of changes has one relation, or several small ones (`row_groups.py`), so that its
statistics say whose changes it may hold. The log of the table knows the size of whole files only,
and compressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow.parquet as pq

from pgcdc_assets.raw.files import filesystem
from pgcdc_assets.raw.scan import data_files, files_between
from pgcdc_assets.raw.table import RawTable
from pgcdc_assets.table_name import TableName

_PLACES = ("schema", "table", "commit_lsn")


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file.

    Attributes:
        schemas, tables, lsns: the least and the greatest in it.
        size_bytes: of its columns, not compressed.
    """

    schemas: tuple[str, str]
    tables: tuple[str, str]
    lsns: tuple[int, int]
    size_bytes: int

    def may_hold(self, name: TableName) -> bool:
        """Return whether changes of a table may be in it."""
        return (
            self.schemas[0] <= name.schema <= self.schemas[1]
            and self.tables[0] <= name.table <= self.tables[1]
        )


@dataclass
class RowGroups:
    """Reads the footer of each file once."""

    table: RawTable
    _known: dict[str, list[RowGroup]] = field(default_factory=dict)

    def between(self, epoch: int, start: int, end: int) -> Sequence[RowGroup]:
        """List the row groups that may hold changes of the epoch with start <= commit_lsn < end.

        A file that cannot be read is left out: whoever reads its rows says why.
        """
        loaded = self.table.load()
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
                groups.append(RowGroup(schemas, tables, lsns, group.total_byte_size))
        return groups


def uncompressed_bytes(table: RawTable, paths: Iterable[str]) -> int:
    """Count the bytes of files' columns, not compressed; a file that cannot be read has none."""
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
