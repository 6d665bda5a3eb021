"""Copy of a table as of an exported snapshot, with the same texts as the replication stream.

COPY writes each value by the output function of its type, as pgoutput does. A cast to text differs
for some types: `true` instead of `t`, char(n) without trailing blanks, an inet without `/32`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2
import pyarrow as pa
from psycopg2 import sql
from psycopg2.errors import UndefinedColumn, UndefinedTable

from pgcdc_assets.errors import ConnectionLost, PgcdcError, SnapshotEnded, TableChanged
from pgcdc_assets.postgres.backend_cancellation import cut_connection, end_session
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.postgres.connection import (
    ConnectionSettings,
    connect,
    query_connection,
)
from pgcdc_assets.postgres.copy.errors import opening_failure, reading_failure
from pgcdc_assets.postgres.copy.ranges import newer_sql, older_sql
from pgcdc_assets.postgres.copy.table_lock import lock_unchanged
from pgcdc_assets.postgres.copy.text import TEXTS, decode_copy_text
from pgcdc_assets.postgres.copy.transport import CHUNK_BYTES, copy_chunks
from pgcdc_assets.postgres.encodings import stored_encoding
from pgcdc_assets.postgres.recovery_conflicts import (
    conflict_error,
    count_conflicts,
    has_more_conflicts,
    is_hot_standby,
    sorted_conflicts,
)
from pgcdc_assets.postgres.snapshots.age import read_xmin_age
from pgcdc_assets.postgres.stream.transport import ServerError

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.encodings import StoredEncoding
    from pgcdc_assets.protocol.relation import Relation

_SCHEMA = pa.schema([pa.field("new", TEXTS, nullable=False)])


@contextlib.contextmanager
def hold_snapshot(settings: ConnectionSettings, snapshot_name: str) -> Iterator[str]:
    """Re-export a snapshot from a session of its own, so that the exporting connection may close.

    A slot's snapshot ends with the next command of its replication connection. To keep that
    connection, and its temporary slot, for the duration of all copies would retain WAL on the
    server.

    Yields:
        The new name of the snapshot.
    """
    with query_connection(settings, "snapshot", statement_timeout_ms=0) as conn:
        begin_at(conn, snapshot_name)
        with conn.cursor() as cursor:
            cursor.execute("select pg_export_snapshot()")
            row = cursor.fetchone()
        assert row is not None
        yield row[0]


@dataclass(frozen=True, slots=True)
class Pages:
    """A range of pages of a table, or of each partition of a partitioned table.

    Attributes:
        start: the first page.
        end: the page after the last page; None: no end.
    """

    start: int = 0
    end: int | None = None

    def condition_sql(self) -> str:
        """Return the range as an SQL condition over ctid; empty for all pages."""
        bounds = [f"ctid >= '({self.start},0)'"] if self.start else []
        bounds += [f"ctid < '({self.end},0)'"] if self.end is not None else []
        return " and ".join(bounds)


class SnapshotReader:
    """Reader of tables as of one exported snapshot, over one connection.

    Args:
        settings: the source database.
        snapshot_name: name of the exported snapshot.
        chunk_bytes: bytes of COPY text per batch.
        statement_timeout_ms: limit of the copy of one range; 0: no limit.
        primary: the primary of the server, if the server is a standby.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        snapshot_name: str,
        chunk_bytes: int = CHUNK_BYTES,
        *,
        statement_timeout_ms: int = 0,
        primary: ConnectionSettings | None = None,
    ) -> None:
        self._settings = settings
        self._primary = primary
        self._snapshot_name = snapshot_name
        self._chunk_bytes = chunk_bytes
        self._limit_ms = statement_timeout_ms
        self._open = contextlib.ExitStack()
        self._conn: Connection | None = None
        self._encoding: StoredEncoding | None = None
        self._current: tuple[Connection, ...] = ()
        self._is_hot_standby = False
        self._conflicts = 0

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def open(self) -> None:
        """Open the connections now, instead of at the first read.

        Raises:
            ConfigurationError: the role cannot connect.
            SnapshotEnded: the exporting session has ended, and the snapshot with it.
            ConnectionLost: the server is not available, has no connection left, or went away.
            DefiniteError: the server refused to begin the transaction.
        """
        try:
            with sorted_conflicts(self._settings, "a connection"):
                self._connections()
        except (psycopg2.Error, OSError) as error:
            raise opening_failure(self._settings, error) from error

    def read(
        self, table: PublishedTable, pages: Pages | None = None, condition: str = ""
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the rows that a publication sends of a table, in batches with one column `new`.

        `new` has one list of texts per row, in the order of `relation.columns`. The lock that keeps
        the table from being altered ends with the iterator. Close an iterator before its end.

        Args:
            table: the table with its published columns. The copy fails if the publication of the
                table has changed since the snapshot; an empty `publication` skips this check.
            pages: the range to read; None: all pages.
            condition: SQL that the rows fulfil as well.

        Raises:
            TableChanged: the table or its publication was altered after the snapshot.
            ConfigurationError: the role cannot read the table, or row-level security would hide
                rows.
            SnapshotEnded: the exporting session has ended, and the snapshot with it, or a standby
                ended the copy by a conflict with recovery. On a standby, rows that were yielded
                before this error may be too few.
            ConnectionLost: the connection was lost.
        """
        query = rows_of(table.relation, table.is_partitioned, table.row_filter, pages, condition)
        return self._read(table, query, len(table.relation.columns))

    def read_newer(
        self, table: PublishedTable, pages: Pages, xmin: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the rows of a range that a snapshot with this `xmin` may not have seen."""
        query = _rows_where(table, pages, newer_sql(xmin))
        return self._read(table, query, len(table.relation.columns))

    def read_older_keys(
        self, table: PublishedTable, pages: Pages, xmin: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the keys (`Relation.row_key`) of all other rows of a range."""
        key = table.relation.row_key
        names = sql.SQL(", ").join(map(sql.Identifier, key))
        return self._read(table, _rows_where(table, pages, older_sql(xmin), names), len(key))

    def count_older(self, table: PublishedTable, pages: Pages, xmin: int) -> int:
        """Return the number of these other rows."""
        query = _rows_where(table, pages, older_sql(xmin), sql.SQL("count(*)"))
        with contextlib.closing(self._read(table, query, 1)) as batches:
            texts = [row[0] for batch in batches for row in batch.column("new").to_pylist()]
        return int(texts[0])

    def _read(
        self, table: PublishedTable, query: sql.Composed, column_count: int
    ) -> Generator[pa.RecordBatch, None, None]:
        relation = table.relation
        is_complete = False
        try:
            conn, current = self._connections()
            _execute(conn, "savepoint before_table")
            lock_unchanged(conn, current, relation, query, table.publication)
            # As stored: a conversion by the server would end the copy at a text that has no form in
            # UTF-8.
            statement = sql.SQL("copy ({}) to stdout (encoding {})").format(
                query, sql.Literal(conn.get_parameter_status("server_encoding"))
            )
            with contextlib.closing(
                copy_chunks(self._settings, conn, statement.as_string(conn), self._chunk_bytes)
            ) as chunks:
                for chunk in chunks:
                    rows = decode_copy_text(chunk, column_count, self._encoding)
                    yield pa.RecordBatch.from_arrays([rows], schema=_SCHEMA)
            self._check_held(relation)
            is_complete = True
        except (UndefinedTable, UndefinedColumn) as error:
            raise TableChanged(relation=relation.qualified_name) from error
        except (psycopg2.Error, ServerError, OSError) as error:
            # The cause is part of the error in Dagster, and may quote a row.
            raise self._failure(relation, error) from None
        finally:
            # After an error, or if the caller stops early, the state of the connection is unknown.
            self._end_read(is_complete)

    def _check_held(self, relation: Relation) -> None:
        """Check on a standby that the exporting session still held the snapshot after the read.

        Before a standby removes rows, it ends the sessions that it has found to see them. A session
        that imports a snapshot later is not among them, and reads on without these rows (list of
        GetConflictingVirtualXIDs in procarray.c). The exporting session is always among them.

        Raises:
            SnapshotEnded: it did not: rows may be missing.
        """
        if not self._is_hot_standby:
            return
        try:
            begin_at(self._current[0], self._snapshot_name)
        except SnapshotEnded as error:
            doing = f"the snapshot of the copy of {relation.qualified_name}"
            raise conflict_error(self._settings.describe(), doing) from error
        _execute(self._current[0], "rollback")

    def _failure(
        self, relation: Relation, error: psycopg2.Error | ServerError | OSError
    ) -> PgcdcError:
        cursor = error.cursor if isinstance(error, psycopg2.Error) else None
        if self._primary is not None and cursor is not None:
            if self._current and cursor.connection is self._current[-1]:
                return reading_failure(self._primary, relation, error)
        settings, is_standby = self._settings, self._is_hot_standby
        failure = reading_failure(settings, relation, error, is_standby=is_standby)
        is_lost = is_standby and isinstance(failure, ConnectionLost)
        if is_lost and has_more_conflicts(settings, self._conflicts):
            doing = f"the copy of {relation.qualified_name}"
            return conflict_error(settings.describe(), doing)
        return failure

    def _end_read(self, is_complete: bool) -> None:
        """Release the lock on the table; of an incomplete read, by closing the connections."""
        if is_complete and self._conn is not None:
            try:
                _execute(
                    self._conn,
                    "rollback to savepoint before_table; release savepoint before_table",
                )
                return
            except psycopg2.Error:
                # All rows were read. The next read opens a new connection.
                pass
        self._close()

    def read_xmin_age(self, xmin: int) -> int | None:
        """Return the age of the snapshot's `xmin`; None without a connection after an error."""
        try:
            # A standby does not know the newest transactions.
            return read_xmin_age(self._current[-1], xmin) if self._current else None
        except psycopg2.Error:
            # A lost connection is the error of the next read.
            return None

    def cancel(self) -> None:
        """End the read of another thread, and its connections, also if the server is silent."""
        conn = self._conn
        for current in self._current:
            cut_connection(current)
        if conn is not None:
            end_session(self._settings, conn)

    def _connections(self) -> tuple[Connection, tuple[Connection, ...]]:
        """Return a connection that reads as of the snapshot, and those that read the present.

        Of a standby, the present is that of the standby and that of its primary.
        """
        if self._conn is None:
            self._close()
            settings = self._settings
            open_ = self._open.enter_context
            conn = open_(
                contextlib.closing(connect(settings, "copy", statement_timeout_ms=self._limit_ms))
            )
            begin_at(conn, self._snapshot_name)
            servers = (settings,) if self._primary is None else (settings, self._primary)
            self._current = tuple(
                open_(contextlib.closing(connect(server, "catalog"))) for server in servers
            )
            self._encoding = stored_encoding(self._current[0])
            self._is_hot_standby = is_hot_standby(conn)
            self._conflicts = count_conflicts(self._current[0]) if self._is_hot_standby else 0
            self._conn = conn
        return self._conn, self._current

    def _close(self) -> None:
        self._conn, self._current = None, ()
        self._open.close()


def copy_published(
    settings: ConnectionSettings,
    table: PublishedTable,
    snapshot_name: str,
    chunk_bytes: int = CHUNK_BYTES,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield a table's rows as of a snapshot. See `SnapshotReader.read`."""
    with SnapshotReader(settings, snapshot_name, chunk_bytes) as reader:
        yield from reader.read(table)


def begin_at(conn: Connection, snapshot_name: str) -> None:
    """Begin a transaction that reads as of an exported snapshot.

    Raises:
        SnapshotEnded: the exporting session has ended, and the snapshot with it.
    """
    with conn.cursor() as cursor:
        cursor.execute("begin isolation level repeatable read, read only")
        try:
            cursor.execute("set transaction snapshot %s", (snapshot_name,))
        except psycopg2.DatabaseError as error:
            if error.pgcode not in {"22023", "55000", "42704"}:
                raise
            raise SnapshotEnded(
                reason=f"Snapshot {snapshot_name} does not exist any more: the session that "
                "exported the snapshot has ended. Run it again."
            ) from error


def _execute(conn: Connection, statement: str) -> None:
    with conn.cursor() as cursor:
        cursor.execute(statement)


def rows_of(
    relation: Relation,
    is_partitioned: bool,
    row_filter: str | None,
    pages: Pages | None = None,
    condition: str = "",
    selected: sql.Composable | None = None,
) -> sql.Composed:
    """Return the query of the rows and columns that a publication sends of a table.

    Args:
        condition: SQL that the rows fulfil as well.
        selected: SQL of other columns.
    """
    # The text of pg_get_expr() with an empty search_path: every name has its schema.
    conditions = [f"({row_filter})"] if row_filter else []
    conditions += [within] if pages is not None and (within := pages.condition_sql()) else []
    conditions += [condition] if condition else []
    if selected is None:
        selected = sql.SQL(", ").join(sql.Identifier(column.name) for column in relation.columns)
    return sql.SQL("select {selected} from {only} {table}{where}").format(
        selected=selected,
        only=sql.SQL("" if is_partitioned else "only"),
        table=sql.Identifier(relation.schema, relation.table),
        where=sql.SQL(f" where {' and '.join(conditions)}" if conditions else ""),
    )


def _rows_where(
    table: PublishedTable, pages: Pages, condition: str, selected: sql.Composable | None = None
) -> sql.Composed:
    return rows_of(
        table.relation, table.is_partitioned, table.row_filter, pages, condition, selected
    )
