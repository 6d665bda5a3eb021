"""Digests of a table's rows as of an exported snapshot, computed by the server: rows stay there.

A row is written as its columns' texts one after the other, each with its length before it, so that
no two rows read alike; NULL is a mark without a length, and bytes that are not UTF-8 are hex behind
a mark of their own. The text of a value is that of its type's
output function, as COPY and pgoutput write it: `concat()` calls that function where a cast to text
would not (`true` for `t`, blanks of char(n) lost, `/32` of an inet lost). Rows are grouped into
buckets by the first hex digits of their key's digest, and a bucket is summed up so that the order
of its rows does not matter.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import psycopg2
from psycopg2 import sql
from psycopg2.errors import UndefinedColumn, UndefinedTable

from pgcdc_assets.errors import ConfigurationError, TableChanged, TransientError
from pgcdc_assets.postgres.catalog import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import SQL_ASCII, ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy import (
    begin_at,
    lock_unchanged,
    reading_failure,
    rows_of,
)
from pgcdc_assets.postgres.publication import explain_unpublished
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Column, Relation

NULL_MARK = "N"
# Between length and hex; between the length and a text stands a colon.
BYTES_MARK = "x"

# The hex of UTF-8 (RFC 3629, section 4), a character in each turn.
_UTF8_HEX = (
    "^([0-7].|(c[2-9a-f]|d.)[89ab].|e0[ab].[89ab].|e[1-9abcef][89ab].[89ab].|ed[89].[89ab].|"
    "f0[9ab].([89ab].){2}|f[123]([89ab].){3}|f48.([89ab].){2})*$"
)

_FETCHED_ROWS = 10_000

# concat() takes 100 arguments at most.
_ARGUMENTS = 50

_PLAIN_TEXT = frozenset({"text", "varchar"})


class Form(enum.Enum):
    """How a value is written before it is digested; whoever compares writes it likewise."""

    TEXT = "the text of its output function"
    FLOAT = "the 64 bits of a float in hex: engines print the shortest digits differently"
    FLOATS = "an array of such bits"


@dataclass(frozen=True)
class DigestedColumn:
    """A column that takes part in a row's digest."""

    name: str
    form: Form = Form.TEXT


class Bucket(NamedTuple):
    """The rows of one bucket: how many, and two sums of 32 bits of each row's digest."""

    row_count: int
    first_sum: int
    second_sum: int


class RowDetail(NamedTuple):
    """One row, looked at closely.

    Attributes:
        key: texts of the key's columns.
        columns: a digest of each column's value, in the order of the columns.
    """

    key_digest: str
    row_digest: str
    key: tuple[str | None, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True)
class SourceTable:
    """A published table, locked against alteration, in a transaction as of the snapshot."""

    settings: ConnectionSettings
    connection: Connection
    published: PublishedTable

    @property
    def relation(self) -> Relation:
        """The table's published columns as of the snapshot."""
        return self.published.relation

    def digests(self, columns: Sequence[DigestedColumn], key: Sequence[int]) -> SourceDigests:
        """Digest rows of these columns.

        Args:
            key: indexes of the columns that tell rows apart.
        """
        return SourceDigests(self, tuple(columns), tuple(key))


@contextlib.contextmanager
def open_source_table(
    settings: ConnectionSettings, publication: str, schema: str, table: str, snapshot_name: str
) -> Iterator[SourceTable]:
    """Open a published table as of a snapshot; no statement inside is limited in time.

    Raises:
        ConfigurationError: it is not published, or we may not read it.
        TransientError: it was altered since the snapshot, or the snapshot is gone.
        ConnectionLost: the server went away.
    """
    with query_connection(settings, "verify", statement_timeout_ms=0) as conn:
        begin_at(conn, snapshot_name)
        found = [
            published
            for published in published_tables(conn, publication)
            if (published.relation.schema, published.relation.table) == (schema, table)
        ]
        if not found:
            reason = explain_unpublished(conn, publication, schema, table)
            raise ConfigurationError(reason=f"Table {TableName(schema, table)} {reason}.")
        relation = found[0].relation
        query = rows_of(relation, found[0].is_partitioned, found[0].row_filter)
        try:
            lock_unchanged(settings, conn, relation, query, publication)
        except (UndefinedTable, UndefinedColumn, TableChanged) as error:
            raise TransientError(
                reason=f"Table {relation.qualified_name} was altered while it was compared. Run "
                "it again."
            ) from error
        except psycopg2.Error as error:
            raise reading_failure(settings, relation, error) from error
        yield SourceTable(settings, conn, found[0])


@dataclass(frozen=True)
class SourceDigests:
    """Asks the server for digests of one table's rows."""

    source: SourceTable
    columns: tuple[DigestedColumn, ...]
    key: tuple[int, ...]

    def buckets(self, digits: int) -> dict[str, Bucket]:
        """Sum up the rows of each bucket that has any.

        Args:
            digits: hex digits that name a bucket.
        """
        query = sql.SQL(
            "select substr(key_digest, 1, {digits}), count(*), "
            "sum(('x' || substr(row_digest, 1, 8))::bit(32)::bigint), "
            "sum(('x' || substr(row_digest, 9, 8))::bit(32)::bigint) from ({rows}) r group by 1"
        ).format(digits=sql.Literal(digits), rows=self._rows())
        return {
            bucket: Bucket(int(count), int(first), int(second))
            for bucket, count, first, second in self._ask(query)
        }

    def rows(self, buckets: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Give digests of key and row, by the key's digest, of all rows in the buckets."""
        query = sql.SQL(
            "select key_digest, row_digest from ({rows}) r "
            "where substr(key_digest, 1, {digits}) = any({buckets}::text[]) "
            'order by key_digest collate "C"'
        ).format(
            rows=self._rows(),
            digits=sql.Literal(len(buckets[0])),
            buckets=sql.Literal(list(buckets)),
        )
        yield from ((key_digest, row_digest) for key_digest, row_digest in self._fetch(query))

    def details(self, key_digests: Sequence[str]) -> Iterator[RowDetail]:
        """Look closely at the rows with these keys."""
        if not key_digests:
            return
        query = sql.SQL(
            "select key_digest, row_digest, array[{key}]::text[], array[{columns}]::text[] "
            "from ({rows}) r where key_digest = any({wanted}::text[])"
        ).format(
            key=sql.SQL(", ").join(self._shown(i) for i in self.key),
            columns=sql.SQL(", ").join(
                sql.SQL("md5({})").format(self._bytes(self._piece(i)))
                for i in range(len(self.columns))
            ),
            rows=self._rows(),
            wanted=sql.Literal(list(key_digests)),
        )
        for key_digest, row_digest, key, columns in self._fetch(query):
            yield RowDetail(key_digest, row_digest, tuple(key), tuple(columns))

    def _rows(self) -> sql.Composed:
        """Write the query of all rows: the columns' texts, and digests of key and row.

        OFFSET 0 keeps the planner from merging the levels, which would compute a text again
        wherever it is used.
        """
        published = self.source.published
        known = {column.name: column for column in published.relation.columns}
        texts = [
            sql.SQL("{} as {}").format(_text(known[column.name], column.form), self._column(i))
            for i, column in enumerate(self.columns)
        ]
        selected = rows_of(published.relation, published.is_partitioned, published.row_filter)
        return sql.SQL(
            "select *, md5({key}) as key_digest, md5({row}) as row_digest "
            "from (select {texts} from ({selected}) s offset 0) t offset 0"
        ).format(
            key=self._bytes(_joined([self._piece(i) for i in self.key])),
            row=self._bytes(_joined([self._piece(i) for i in range(len(self.columns))])),
            texts=sql.SQL(", ").join(texts),
            selected=selected,
        )

    def _column(self, index: int) -> sql.Identifier:
        return sql.Identifier(f"t{index}")

    def _piece(self, index: int) -> sql.Composable:
        column = self._column(index)
        text = sql.SQL("coalesce(octet_length({bytes})::text || ':' || {text}, {null})").format(
            bytes=self._bytes(column), text=column, null=sql.Literal(NULL_MARK)
        )
        marked = sql.SQL("length({hex})::text || {mark} || {hex}").format(
            hex=_hex(column), mark=sql.Literal(BYTES_MARK)
        )
        return self._if_bytes(index, marked, text)

    def _shown(self, index: int) -> sql.Composable:
        """Write a value as it can be sent to a client."""
        column = self._column(index)
        return self._if_bytes(index, sql.SQL("'\\x' || {}").format(_hex(column)), column)

    def _if_bytes(
        self, index: int, then: sql.Composable, otherwise: sql.Composable
    ) -> sql.Composable:
        """Choose by whether a value is not UTF-8, which it is in every encoding but one."""
        if self._encoding != SQL_ASCII:
            return otherwise
        return sql.SQL("case when {hex} !~ {utf8} then {then} else {otherwise} end").format(
            hex=_hex(self._column(index)),
            utf8=sql.Literal(_UTF8_HEX),
            then=then,
            otherwise=otherwise,
        )

    @property
    def _encoding(self) -> str | None:
        return self.source.connection.get_parameter_status("server_encoding")

    def _bytes(self, text: sql.Composable) -> sql.Composable:
        """Write the UTF-8 of a text; what is UTF-8 already needs no conversion."""
        if self._encoding in ("UTF8", SQL_ASCII):
            return text
        return sql.SQL("convert_to({}, 'UTF8')").format(text)

    def _ask(self, query: sql.Composable) -> list[tuple[str, ...]]:
        """Run a query with few rows; without a cursor the server may use several processes."""
        try:
            with self.source.connection.cursor() as cursor:
                # Without parameters psycopg2 leaves percent signs of names and filters alone.
                cursor.execute(query)
                return cursor.fetchall()
        except psycopg2.Error as error:
            raise reading_failure(self.source.settings, self.source.relation, error) from error

    def _fetch(self, query: sql.Composable) -> Iterator[tuple[str, ...]]:
        """Run a query and give its rows, a limited number of them held at a time."""
        relation = self.source.relation
        try:
            with self.source.connection.cursor() as cursor:
                # All rows are fetched: a plan for the first few would be the wrong one.
                cursor.execute("set local cursor_tuple_fraction = 1")
                cursor.execute(sql.SQL("declare digests no scroll cursor for {}").format(query))
                while rows := _next_rows(cursor):
                    yield from rows
                cursor.execute("close digests")
        except psycopg2.Error as error:
            raise reading_failure(self.source.settings, relation, error) from error


def _next_rows(cursor: psycopg2.extensions.cursor) -> list[tuple[str, ...]]:
    cursor.execute(sql.SQL("fetch {} from digests").format(sql.Literal(_FETCHED_ROWS)))
    return cursor.fetchall()


def _text(column: Column, form: Form) -> sql.Composable:
    """Write the text of a value; NULL for NULL.

    IS NULL would take a composite of NULLs for NULL; IS NOT DISTINCT FROM NULL does not.
    """
    name = sql.Identifier(column.name)
    if form is Form.FLOAT:
        return sql.SQL("encode(float8send({}::float8), 'hex')").format(name)
    if column.element_type is None and column.base_type in _PLAIN_TEXT:
        return sql.SQL("{}::text").format(name)
    text = sql.SQL("case when {name} is distinct from null then concat({name}) end").format(
        name=name
    )
    if form is Form.FLOATS:
        # Other shapes have no Spark array, and are kept as text.
        return sql.SQL(
            "case when array_ndims({name}) = 1 and array_lower({name}, 1) = 1 then "
            "(select '{{' || string_agg(coalesce(encode(float8send(e::float8), 'hex'), 'NULL'), "
            "',' order by n) || '}}' from unnest({name}) with ordinality u(e, n)) "
            "else {text} end"
        ).format(name=name, text=text)
    return text


def _hex(text: sql.Composable) -> sql.Composed:
    """Write the hex of a text's bytes in a database that does not know what they mean."""
    return sql.SQL("encode(convert_to({}, {}), 'hex')").format(text, sql.Literal(SQL_ASCII))


def _joined(pieces: Sequence[sql.Composable]) -> sql.Composable:
    while len(pieces) > 1:
        pieces = [
            sql.SQL("concat({})").format(sql.SQL(", ").join(pieces[start : start + _ARGUMENTS]))
            for start in range(0, len(pieces), _ARGUMENTS)
        ]
    return pieces[0]
