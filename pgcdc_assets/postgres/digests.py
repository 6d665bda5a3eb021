"""Digests of a table's rows as of an exported snapshot. The server computes the digests.

The digested text of a row is the concatenation of its columns' texts, each with its length as
prefix, so two different rows have different texts. NULL is a mark without a length. Bytes that are
not UTF-8 are hex behind a mark of their own. The text of a value is the result of its type's output
function, as in COPY and pgoutput: `concat()` calls the output function. A cast to text differs for
some types: `true` instead of `t`, char(n) without trailing blanks, an inet without `/32`.

The first hex digits of the key's digest assign a row to a bucket. The digest of a bucket is a sum
over its rows, independent of their order.

For a table with columns `id int` (the key) and `note text` the query of all rows is

    select *, md5(concat(t0)) as key_digest, md5(concat(t0, t1)) as row_digest
      from (select <text of id> as t0, <text of note> as t1 from (select id, note from ...) s) t

with each `t0` and `t1` inside of md5() written as length, colon and text, or as the NULL mark.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import psycopg2
from psycopg2 import sql
from psycopg2.errors import UndefinedColumn, UndefinedTable

from pgcdc_assets.errors import ConfigurationError, TableChanged, TransientError
from pgcdc_assets.postgres.catalog import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import SQL_ASCII, ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy import begin_at, rows_of
from pgcdc_assets.postgres.copy_errors import reading_failure
from pgcdc_assets.postgres.moved_tables import find_declared_table
from pgcdc_assets.postgres.publication import explain_unpublished
from pgcdc_assets.postgres.table_lock import lock_unchanged
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Column, Relation

NULL_MARK = "N"
# Separator between the length and the hex of a value; a colon separates a length from a text.
BYTES_MARK = "x"

# Regular expression of the hex of UTF-8 text (RFC 3629, section 4), one character per repetition.
_UTF8_HEX = (
    "^([0-7].|(c[2-9a-f]|d.)[89ab].|e0[ab].[89ab].|e[1-9abcef][89ab].[89ab].|ed[89].[89ab].|"
    "f0[9ab].([89ab].){2}|f[123]([89ab].){3}|f48.([89ab].){2})*$"
)

_FETCHED_ROWS = 10_000

# A function has 100 arguments at most (FUNC_MAX_ARGS).
_ARGUMENTS = 50

# Numbers from here on, and down from here, have no nearest float of 64 bits but infinity and zero.
_TOO_LARGE = Fraction(2**1024 - 2**970)
_TOO_SMALL = Fraction(1, 2**1075)

_PLAIN_TEXT = frozenset({"text", "varchar"})


class Form(enum.Enum):
    """The text form of a value before the digest. Both sides of a comparison use the same form."""

    TEXT = "the text of its output function"
    FLOAT = "the 64 bits of a float in hex: engines print the shortest digits differently"
    FLOATS = "an array of such bits"
    VECTOR = "a vector of pgvector as such an array"
    NUMERIC = "a numeric without trailing zeros, which a DECIMAL of another scale prints"
    NUMERIC_FLOAT = "the bits of a numeric's nearest float, or its text beyond the range of floats"
    PRESENCE = "whether there is a value: no engine prints a VARIANT as Postgres prints JSON"


@dataclass(frozen=True)
class DigestedColumn:
    """A column of a row's digest."""

    name: str
    form: Form = Form.TEXT


class Bucket(NamedTuple):
    """The digest of one bucket.

    Attributes:
        row_count: number of rows.
        first_sum: sum of the first 32 bits of all row digests.
        second_sum: sum of the second 32 bits of all row digests.
    """

    row_count: int
    first_sum: int
    second_sum: int


class RowDetail(NamedTuple):
    """The digests of one row and of its columns.

    Attributes:
        key_digest: digest of the key, hex.
        row_digest: digest of the row, hex.
        key: texts of the key's columns.
        columns: digest of each column's value, in the order of the columns.
    """

    key_digest: str
    row_digest: str
    key: tuple[str | None, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True)
class SourceTable:
    """A published table in a transaction as of a snapshot, locked against ALTER TABLE."""

    settings: ConnectionSettings
    connection: Connection
    published: PublishedTable

    @property
    def relation(self) -> Relation:
        """The table's published columns as of the snapshot."""
        return self.published.relation

    def digests(self, columns: Sequence[DigestedColumn], key: Sequence[int]) -> SourceDigests:
        """Return the reader of digests over `columns`.

        Args:
            columns: the digested columns.
            key: indexes of the key columns in `columns`.
        """
        return SourceDigests(self, tuple(columns), tuple(key))


@contextlib.contextmanager
def open_source_table(
    settings: ConnectionSettings,
    publication: str,
    name: TableName,
    snapshot_name: str,
    relation_id: int | None = None,
) -> Iterator[SourceTable]:
    """Open a published table as of a snapshot. Statements inside the block have no time limit.

    Args:
        name: the declared name.
        relation_id: the table's OID, for a table that has another name now; None if unknown.

    Raises:
        ConfigurationError: the table is not published, or the role cannot read the table.
        TransientError: the table was altered after the snapshot, or the snapshot does not exist.
        ConnectionLost: the connection was lost.
    """
    with query_connection(settings, "verify", statement_timeout_ms=0) as conn:
        begin_at(conn, snapshot_name)
        found = find_declared_table(published_tables(conn, publication), name, relation_id)
        if found is None:
            reason = explain_unpublished(conn, publication, *name)
            raise ConfigurationError(reason=f"Table {name} {reason}.")
        relation = found.relation
        query = rows_of(relation, found.is_partitioned, found.row_filter)
        try:
            with query_connection(settings, "catalog") as current:
                lock_unchanged(conn, [current], relation, query, publication)
        except (UndefinedTable, UndefinedColumn, TableChanged) as error:
            raise TransientError(
                reason=f"Table {relation.qualified_name} was altered during the comparison. Run "
                "it again."
            ) from error
        except psycopg2.Error as error:
            raise reading_failure(settings, relation, error) from error
        yield SourceTable(settings, conn, found)


@dataclass(frozen=True)
class SourceDigests:
    """Reader of digests of one table's rows.

    Attributes:
        source: the table.
        columns: the digested columns.
        key: indexes of the key columns in `columns`.
    """

    source: SourceTable
    columns: tuple[DigestedColumn, ...]
    key: tuple[int, ...]

    def buckets(self, digits: int) -> dict[str, Bucket]:
        """Return the digests of all buckets with rows, by the bucket's hex digits.

        Args:
            digits: number of hex digits of a bucket.
        """
        query = sql.SQL(
            "select substr(key_digest, 1, {digits}), count(*), "
            "sum(('x' || substr(row_digest, 1, 8))::bit(32)::bigint), "
            "sum(('x' || substr(row_digest, 9, 8))::bit(32)::bigint) from ({rows}) r group by 1"
        ).format(digits=sql.Literal(digits), rows=self._rows())
        return {
            bucket: Bucket(int(count), int(first), int(second))
            for bucket, count, first, second in self._fetch_all(query)
        }

    def rows(self, buckets: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield key digest and row digest of all rows in the buckets, ordered by key digest."""
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
        """Yield the details of the rows with these key digests."""
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
        """Return the query of all rows with texts, key digest and row digest.

        OFFSET 0 prevents the planner from flattening the subqueries. A flattened query would
        compute a text once per use.
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
        """Return the expression of a value that the server can send to a UTF-8 client."""
        column = self._column(index)
        return self._if_bytes(index, sql.SQL("'\\x' || {}").format(_hex(column)), column)

    def _if_bytes(
        self, index: int, then: sql.Composable, otherwise: sql.Composable
    ) -> sql.Composable:
        """Return `then` for a value that is not UTF-8, else `otherwise`.

        Values that are not UTF-8 exist in databases of encoding SQL_ASCII only.
        """
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
        """Return the expression of a text in UTF-8, converted from the database's encoding."""
        if self._encoding in ("UTF8", SQL_ASCII):
            return text
        return sql.SQL("convert_to({}, 'UTF8')").format(text)

    def _fetch_all(self, query: sql.Composable) -> list[tuple[str, ...]]:
        """Run a query with few rows, without a cursor: the server may use parallel workers."""
        try:
            with self.source.connection.cursor() as cursor:
                # Without parameters psycopg2 does not interpret percent signs in names and filters.
                cursor.execute(query)
                return cursor.fetchall()
        except psycopg2.Error as error:
            raise reading_failure(self.source.settings, self.source.relation, error) from error

    def _fetch(self, query: sql.Composable) -> Iterator[tuple[str, ...]]:
        """Run a query with a cursor, and yield its rows in portions of bounded size."""
        relation = self.source.relation
        try:
            with self.source.connection.cursor() as cursor:
                # All rows are fetched: prevent a plan that is optimised for the first rows.
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
    """Return the expression of a value's text; NULL for NULL.

    The expression uses IS DISTINCT FROM NULL, because IS NULL is true for a row of NULLs as well.
    """
    name: sql.Composable = sql.Identifier(column.name)
    if form is Form.FLOAT:
        return sql.SQL("encode(float8send({}::float8), 'hex')").format(name)
    if column.element_type is None and column.base_type in _PLAIN_TEXT:
        return sql.SQL("{}::text").format(name)
    if form is Form.PRESENCE:
        return sql.SQL("case when {} is distinct from null then '' end").format(name)
    if form is Form.NUMERIC:
        return sql.SQL("trim_scale({})::text").format(name)
    text = sql.SQL("case when {name} is distinct from null then concat({name}) end").format(
        name=name
    )
    if form is Form.NUMERIC_FLOAT:
        # NaN is above every number.
        return sql.SQL(
            "case when {name} in ('NaN', 'Infinity', '-Infinity') or {name} = 0 or "
            "(abs({name}) < {most} and abs({name}) > {least}) "
            "then encode(float8send({name}::float8), 'hex') else {text} end"
        ).format(name=name, text=text, most=_number(_TOO_LARGE), least=_number(_TOO_SMALL))
    if form is Form.VECTOR:
        name = sql.SQL("{}::real[]").format(name)
    if form in (Form.FLOATS, Form.VECTOR):
        # Arrays of other dimensions have no Spark type: the tables keep them as text.
        return sql.SQL(
            "case when array_ndims({name}) = 1 and array_lower({name}, 1) = 1 then "
            "(select '{{' || string_agg(coalesce(encode(float8send(e::float8), 'hex'), 'NULL'), "
            "',' order by n) || '}}' from unnest({name}) with ordinality u(e, n)) "
            "else {text} end"
        ).format(name=name, text=text)
    return text


def _number(value: Fraction) -> sql.Composable:
    """Return the literal of a number whose denominator is a power of two."""
    digits = value.denominator.bit_length() - 1
    scaled = str(value.numerator * 5**digits).rjust(digits + 1, "0")
    text = f"{scaled[:-digits]}.{scaled[-digits:]}" if digits else scaled
    return sql.SQL("{}::numeric").format(sql.Literal(text))


def _hex(text: sql.Composable) -> sql.Composed:
    """Return the expression of the hex of a text's bytes in a database of encoding SQL_ASCII."""
    return sql.SQL("encode(convert_to({}, {}), 'hex')").format(text, sql.Literal(SQL_ASCII))


def _joined(pieces: Sequence[sql.Composable]) -> sql.Composable:
    while len(pieces) > 1:
        pieces = [
            sql.SQL("concat({})").format(sql.SQL(", ").join(pieces[start : start + _ARGUMENTS]))
            for start in range(0, len(pieces), _ARGUMENTS)
        ]
    return pieces[0]
