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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import psycopg2
from psycopg2 import sql
from psycopg2.errors import UndefinedColumn, UndefinedTable

from pgcdc_assets.errors import ConfigurationError, TableChanged, TransientError
from pgcdc_assets.postgres.catalog.moved_tables import find_declared_table
from pgcdc_assets.postgres.catalog.publication import explain_unpublished
from pgcdc_assets.postgres.catalog.relations import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import SQL_ASCII, ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.digest_text import Form, text_sql
from pgcdc_assets.postgres.copy.errors import reading_failure
from pgcdc_assets.postgres.copy.reader import begin_at, rows_of
from pgcdc_assets.postgres.copy.table_lock import lock_unchanged
from pgcdc_assets.postgres.encodings import stored_encoding
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Relation

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

    def rows(self, buckets: Sequence[str]) -> Iterator[tuple[str, str, int]]:
        """Yield the digests of key and row in the buckets in order, with the number of rows."""
        query = sql.SQL(
            "select key_digest, row_digest, count(*) from ({rows}) r "
            "where substr(key_digest, 1, {digits}) = any({buckets}::text[]) "
            "group by key_digest, row_digest "
            'order by key_digest collate "C", row_digest collate "C"'
        ).format(
            rows=self._rows(),
            digits=sql.Literal(len(buckets[0])),
            buckets=sql.Literal(list(buckets)),
        )
        yield from ((key, row, int(count)) for key, row, count in self._fetch(query))

    def details(self, key_digests: Sequence[str]) -> Iterator[RowDetail]:
        """Yield the details of the different rows with these key digests."""
        if not key_digests:
            return
        query = sql.SQL(
            "select distinct key_digest, row_digest, array[{key}]::text[], "
            "array[{columns}]::text[] "
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
            sql.SQL("{} as {}").format(text_sql(known[column.name], column.form), self._column(i))
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
            hex=_hex(column, self._encoding), mark=sql.Literal(BYTES_MARK)
        )
        return self._if_bytes(index, marked, text)

    def _shown(self, index: int) -> sql.Composable:
        """Return the expression of a value that the server can send to a UTF-8 client."""
        column = self._column(index)
        return self._if_bytes(
            index, sql.SQL("'\\x' || {}").format(_hex(column, self._encoding)), column
        )

    def _if_bytes(
        self, index: int, then: sql.Composable, otherwise: sql.Composable
    ) -> sql.Composable:
        """Return `then` for a value that has no form in UTF-8, else `otherwise`.

        Such values exist in databases of encoding SQL_ASCII, and of encodings in which a byte has
        no character.
        """
        condition = self._condition
        if condition is None:
            return otherwise
        return sql.SQL("case when {hex} {condition} then {then} else {otherwise} end").format(
            hex=_hex(self._column(index), self._encoding),
            condition=condition,
            then=then,
            otherwise=otherwise,
        )

    @cached_property
    def _encoding(self) -> str:
        return self.source.connection.get_parameter_status("server_encoding") or "UTF8"

    @cached_property
    def _condition(self) -> sql.Composable | None:
        """The condition that the hex of a value without a form in UTF-8 fulfils, if possible."""
        if self._encoding == SQL_ASCII:
            return sql.SQL("!~ {}").format(sql.Literal(_UTF8_HEX))
        if self._encoding == "UTF8":
            return None
        # An unknown character would end the transaction as of the snapshot.
        with query_connection(self.source.settings, "catalog") as conn:
            encoding = stored_encoding(conn)
            unknown = encoding.unknown_bytes() if encoding is not None else b""
        if not unknown:
            return None
        pattern = "^(..)*({})".format("|".join(f"{byte:02x}" for byte in unknown))
        return sql.SQL("~ {}").format(sql.Literal(pattern))

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
            # The cause is part of the error in Dagster, and may quote a row.
            raise reading_failure(self.source.settings, self.source.relation, error) from None

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
            raise reading_failure(self.source.settings, relation, error) from None


def _next_rows(cursor: psycopg2.extensions.cursor) -> list[tuple[str, ...]]:
    cursor.execute(sql.SQL("fetch {} from digests").format(sql.Literal(_FETCHED_ROWS)))
    return cursor.fetchall()


def _hex(text: sql.Composable, encoding: str) -> sql.Composed:
    """Return the expression of the hex of a text's bytes in a database of this encoding."""
    return sql.SQL("encode(convert_to({}, {}), 'hex')").format(text, sql.Literal(encoding))


def _joined(pieces: Sequence[sql.Composable]) -> sql.Composable:
    if not pieces:
        # A table without columns.
        return sql.Literal("")
    while len(pieces) > 1:
        pieces = [
            sql.SQL("concat({})").format(sql.SQL(", ").join(pieces[start : start + _ARGUMENTS]))
            for start in range(0, len(pieces), _ARGUMENTS)
        ]
    return pieces[0]
