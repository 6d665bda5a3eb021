"""Comparison of the current rows of source and SCD1, value by value, for idle tables.

The module serves tests and demonstrations: the comparison has no LSN, and keeps a digest of every
row in memory. Equal rows of a table without a key are counted. `compare_digests.py` compares tables
of any size while writers commit.

The source's rows are texts of Postgres from one snapshot. The target's rows are read by delta-rs,
without a JVM. `values.py` converts the texts independently of the merge's expressions, so a wrong
conversion is found like a wrong row. The report has tables, columns and counts, but no values.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.catalog.moved_tables import find_declared_table
from pgcdc_assets.postgres.catalog.relations import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.reader import copy_published
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName, quoted
from pgcdc_assets.tables.columns import DELETED, RESCUED
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify.ignored_columns import find_ignored
from pgcdc_assets.verify.report import Comparison
from pgcdc_assets.verify.table_version import open_merged
from pgcdc_assets.verify.values import Reader, Unreadable, comparable, reader_for

# Maximum number of differing rows whose columns are compared.
_EXAMINED_ROWS = 1000


@dataclass
class _Entry:
    """A row of the target: its digest, and its rescued texts."""

    digest: bytes
    rescued: Mapping[str, str]


def compare_table(
    settings: ConnectionSettings,
    zone: RawZone,
    publication: str,
    schema: str,
    table: str,
    key: Sequence[str] | None = None,
) -> Comparison:
    """Compare the current rows of one table's SCD1 and of the source.

    Raises:
        ConfigurationError: the table is not published, has no key, or was never merged.
    """
    path = table_path(zone.lake, zone.name, schema, table, 1)
    target = open_merged(zone, path, str(TableName(schema, table)))
    name = TableName(schema, table)
    with _snapshot(settings, zone, publication, name) as (published, snapshot_name):
        side = _Sides(published.relation, target, key, find_ignored(zone, name, target))
        entries = side.read_target_rows()
        target_rows = sum(map(len, entries.values()))
        source_rows, missing = 0, 0
        differing: dict[bytes, list[str | None]] = {}
        difference_count = 0
        for batch in copy_published(settings, published, snapshot_name):
            for row in batch.column("new").to_pylist():
                source_rows += 1
                row_key = side.source_key(row)
                found = entries.get(row_key)
                if not found:
                    missing += 1
                elif not side.remove(found, row):
                    difference_count += 1
                    if len(differing) < _EXAMINED_ROWS:
                        differing[row_key] = row
        columns = side.unknown_columns + side.differing_columns(differing)
    return Comparison(
        schema,
        table,
        source_rows,
        target_rows,
        missing=missing,
        extra=sum(map(len, entries.values())),
        differing=difference_count,
        columns=tuple(dict.fromkeys(columns)),
    )


def key_columns(relation: Relation, key: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that identify rows: the configured key, the row key, or all columns.

    Raises:
        ConfigurationError: the table has no such column.
    """
    found = tuple(key or relation.row_key) or tuple(c.name for c in relation.columns if c.is_key)
    if not found:
        raise ConfigurationError(
            reason=f"Table {relation.qualified_name} has no key to compare rows by: set its `key`"
        )
    return found


class _Sides:
    """Readers of both sides' rows, as digests. Equal values have equal digests."""

    def __init__(
        self,
        relation: Relation,
        target: DeltaTable,
        key: Sequence[str] | None,
        ignored: frozenset[str],
    ) -> None:
        self.target = target
        arrow = pa.schema(target.schema().to_arrow())
        names = [column.name for column in relation.columns]
        common = [name for name in names if name in arrow.names]
        kept = {name for name in arrow.names if not name.startswith("_")} - ignored
        self.unknown_columns = [name for name in names if name not in arrow.names]
        self.unknown_columns += sorted(kept - set(names))
        self.columns = common
        self.positions = [names.index(name) for name in common]
        self.readers: list[Reader] = [reader_for(arrow.field(name).type) for name in common]
        wanted = key_columns(relation, key)
        self.key = [common.index(name) for name in wanted if name in common]
        self.has_rescued = RESCUED in arrow.names
        self.keeps_deleted = DELETED in arrow.names and DELETED not in names

    def read_target_rows(self) -> dict[bytes, list[_Entry]]:
        """Return the rows by the digests of their keys. Without a key, equal rows have one key."""
        entries: dict[bytes, list[_Entry]] = {}
        for values, rescued in self._target_rows():
            row_key = _digest([values[i] for i in self.key])
            entries.setdefault(row_key, []).append(_Entry(_digest(values), rescued))
        return entries

    def remove(self, entries: list[_Entry], row: Sequence[str | None]) -> bool:
        """Remove the row of the target that equals a source row; without one, remove another.

        Return whether the removed row is equal.
        """
        for place in reversed(range(len(entries))):
            if self.source_digest(row, entries[place].rescued) == entries[place].digest:
                del entries[place]
                return True
        entries.pop()
        return False

    def source_key(self, row: Sequence[str | None]) -> bytes:
        return _digest([_read(self.readers[i], row[self.positions[i]]) for i in self.key])

    def source_digest(self, row: Sequence[str | None], rescued: Mapping[str, str]) -> bytes:
        return _digest(self._source_values(row, rescued))

    def differing_columns(self, rows: Mapping[bytes, Sequence[str | None]]) -> list[str]:
        """Return the names of differing columns, after reading the differing rows again."""
        if not rows:
            return []
        found: set[int] = set()
        for values, rescued in self._target_rows():
            row = rows.get(_digest([values[i] for i in self.key]))
            if row is not None:
                source = self._source_values(row, rescued)
                found |= {i for i, value in enumerate(source) if value != values[i]}
        return [self.columns[i] for i in sorted(found)]

    def _source_values(self, row: Sequence[str | None], rescued: Mapping[str, str]) -> list[Any]:
        values = []
        for name, position, reader in zip(self.columns, self.positions, self.readers, strict=True):
            text = row[position]
            values.append(("rescued", text) if name in rescued else _read(reader, text))
        return values

    def _target_rows(self) -> Iterator[tuple[list[Any], Mapping[str, str]]]:
        wanted = [*self.columns, *([RESCUED] if self.has_rescued else [])]
        wanted += [DELETED] if self.keeps_deleted else []
        for batch in self.target.scan(columns=wanted):
            rows = pa.record_batch(batch)
            columns = [comparable(rows.column(name)) for name in self.columns]
            rescues = (
                rows.column(RESCUED).to_pylist() if self.has_rescued else [None] * rows.num_rows
            )
            deleted = rows.column(DELETED).to_pylist() if self.keeps_deleted else None
            for index, rescue in enumerate(rescues):
                if deleted is not None and deleted[index]:
                    continue
                rescued = dict(rescue) if rescue else {}
                values = [
                    ("rescued", rescued[name]) if name in rescued else column[index]
                    for name, column in zip(self.columns, columns, strict=True)
                ]
                yield values, rescued


@contextlib.contextmanager
def _snapshot(
    settings: ConnectionSettings, zone: RawZone, publication: str, table: TableName
) -> Iterator[tuple[PublishedTable, str]]:
    with query_connection(settings, "verify", statement_timeout_ms=0) as conn:
        with conn.cursor() as cursor:
            cursor.execute("begin isolation level repeatable read, read only")
            cursor.execute("select pg_export_snapshot()")
            exported = cursor.fetchone()
        epoch = zone.epochs.latest()
        known = None if epoch is None else zone.source_relations(epoch.epoch).newest_id(table)
        found = find_declared_table(published_tables(conn, publication), table, known)
        if found is None or exported is None:
            raise ConfigurationError(
                reason=f"Table {table} is not in publication {publication}: add it with alter "
                f"publication {quoted(publication)} add table {quoted(*table)}"
            )
        yield found, exported[0]


def _read(reader: Reader, text: str | None) -> Any:
    if text is None:
        return None
    try:
        return reader(text)
    except Unreadable:
        # Rows without a key are looked up by all their values, as the target has them.
        return ("rescued", text)


def _digest(values: Sequence[Any]) -> bytes:
    return hashlib.blake2b(repr(values).encode(errors="surrogatepass"), digest_size=16).digest()
