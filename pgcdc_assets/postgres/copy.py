"""Copying a table as of an exported snapshot, as the very texts that the stream would carry.

COPY prints each value by its type's output function, as pgoutput does; a cast to text would not
(`true` for `t`, blanks of char(n) lost, `/32` of an inet lost). A thread takes rows off the
connection while the caller decodes and writes the chunks before; few chunks wait between them, so
memory does not grow with the table.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import psycopg2
import pyarrow as pa
from psycopg2 import sql
from psycopg2.errors import InsufficientPrivilege, UndefinedColumn, UndefinedTable

from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    PgcdcError,
    TableChanged,
    TransientError,
)
from pgcdc_assets.postgres.catalog import PublishedTable, read_relations
from pgcdc_assets.postgres.connection import SQL_ASCII, ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy_text import TEXTS, decode_copy_text
from pgcdc_assets.postgres.errors import statement_failure
from pgcdc_assets.postgres.publication import read_membership
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Column, Relation

_CHUNK_BYTES = 8 * 1024 * 1024
_WAITING_CHUNKS = 3
_SCHEMA = pa.schema([pa.field("new", TEXTS, nullable=False)])

# pg_class is read as of the snapshot, pg_relation_filenode() as of now: where they differ the table
# was rewritten or truncated in between, and a rewritten table looks empty to an older snapshot
# (https://www.postgresql.org/docs/current/mvcc-caveats.html).
_REWRITTEN = """
select count(*)
  from pg_class c
 where c.relkind = 'r' and c.relfilenode <> 0
   and c.relfilenode is distinct from pg_relation_filenode(c.oid)
   and (c.oid = %s::bigint::oid or c.oid in (select relid from pg_partition_tree(%s::bigint::oid)))
"""


@contextlib.contextmanager
def hold_snapshot(settings: ConnectionSettings, snapshot_name: str) -> Iterator[str]:
    """Take over an exported snapshot, so that the connection which exported it may end.

    A slot's snapshot lives as long as its replication connection does nothing else; a temporary
    slot held that long would keep WAL on the server for as long as all the copying takes.

    Yields:
        The name under which the snapshot is exported now.
    """
    with query_connection(settings, "snapshot", statement_timeout_ms=0) as conn:
        begin_at(conn, snapshot_name)
        with conn.cursor() as cursor:
            cursor.execute("select pg_export_snapshot()")
            row = cursor.fetchone()
        assert row is not None
        yield row[0]


def copy_relation(
    settings: ConnectionSettings,
    relation: Relation,
    snapshot_name: str,
    *,
    is_partitioned: bool = False,
    row_filter: str | None = None,
    publication: str = "",
    chunk_bytes: int = _CHUNK_BYTES,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield a table's rows as of a snapshot: one column `new`, the texts of each row's columns.

    Args:
        is_partitioned: rows of the partitions belong to the table; else only its own rows, not
            those of tables that inherit from it.
        row_filter: SQL of the publication's row filter, as the catalog prints it.
        publication: has to have published the table in the same way when the snapshot was taken.

    Raises:
        TableChanged: the table is not what it was when the snapshot was taken.
        ConfigurationError: we may not read the table, or row-level security would hide rows.
        ConnectionLost: the server went away.
    """
    with query_connection(settings, "copy", statement_timeout_ms=0) as conn:
        if conn.get_parameter_status("server_encoding") == SQL_ASCII:
            # Under UTF8 the server refuses to send bytes that are not.
            conn.set_client_encoding(SQL_ASCII)
        query = rows_of(relation, is_partitioned, row_filter)
        try:
            begin_at(conn, snapshot_name)
            lock_unchanged(settings, conn, relation, query, publication)
        except (UndefinedTable, UndefinedColumn) as error:
            raise TableChanged(relation=relation.qualified_name) from error
        except psycopg2.Error as error:
            raise reading_failure(settings, relation, error) from error
        statement = sql.SQL("copy ({}) to stdout").format(query).as_string(conn)
        try:
            for chunk in _chunks(conn, statement, chunk_bytes):
                rows = decode_copy_text(chunk, len(relation.columns))
                yield pa.RecordBatch.from_arrays([rows], schema=_SCHEMA)
        except psycopg2.Error as error:
            raise reading_failure(settings, relation, error) from error


def copy_published(
    settings: ConnectionSettings, table: PublishedTable, snapshot_name: str
) -> Iterator[pa.RecordBatch]:
    """Copy a table as its publication sends it; see `copy_relation`."""
    return copy_relation(
        settings,
        table.relation,
        snapshot_name,
        is_partitioned=table.is_partitioned,
        row_filter=table.row_filter,
        publication=table.publication,
    )


def begin_at(conn: Connection, snapshot_name: str) -> None:
    """Begin a transaction that reads as of an exported snapshot.

    Raises:
        TransientError: the snapshot is gone.
    """
    with conn.cursor() as cursor:
        if conn.server_version >= 170000:
            cursor.execute("set transaction_timeout = 0")
        cursor.execute("begin isolation level repeatable read, read only")
        try:
            cursor.execute("set transaction snapshot %s", (snapshot_name,))
        except psycopg2.DatabaseError as error:
            if error.pgcode not in {"22023", "55000", "42704"}:
                raise
            raise TransientError(
                reason=f"Snapshot {snapshot_name} is gone: the session that held it has ended. Run "
                "it again."
            ) from error


def lock_unchanged(
    settings: ConnectionSettings,
    conn: Connection,
    relation: Relation,
    query: sql.Composable,
    publication: str = "",
) -> None:
    """Keep the table from being altered, then check that nobody altered it since the snapshot.

    The stream publishes each change as the catalog was at that change. So a table that joined the
    publication after the snapshot has changes in neither of the two: they committed too late for
    the snapshot and too early for the stream.

    Raises:
        TableChanged: somebody did.
    """
    relation_id = relation.relation_id
    with conn.cursor() as cursor:
        # Takes the lock and checks our privileges as the copy itself will; LOCK TABLE would ask for
        # a privilege on the whole table, where a grant on the published columns is enough.
        cursor.execute(sql.SQL("{} limit 0").format(query))
        cursor.execute(_REWRITTEN, (relation_id, relation_id))
        row = cursor.fetchone()
    then = read_relations(conn, [relation_id]).get(relation_id)
    with query_connection(settings, "catalog") as other:
        now = read_relations(other, [relation_id]).get(relation_id)
        is_republished = bool(publication) and (
            read_membership(conn, publication, relation_id)
            != read_membership(other, publication, relation_id)
        )
    published = {_shape(column) for column in relation.columns}
    if (
        then is None
        or now is None
        or row != (0,)
        or is_republished
        or (now.schema, now.table) != (relation.schema, relation.table)
        or [_shape(column) for column in then.columns] != [_shape(column) for column in now.columns]
        or not published <= {_shape(column) for column in now.columns}
    ):
        raise TableChanged(relation=relation.qualified_name)


def _shape(column: Column) -> tuple[str, int | None, int, int]:
    return column.name, column.attnum, column.type_oid, column.typmod


def rows_of(relation: Relation, is_partitioned: bool, row_filter: str | None) -> sql.Composed:
    """Write the query that gives a table's rows as its publication sends them."""
    return sql.SQL("select {columns} from {only} {table}{where}").format(
        columns=sql.SQL(", ").join(sql.Identifier(column.name) for column in relation.columns),
        only=sql.SQL("" if is_partitioned else "only"),
        table=sql.Identifier(relation.schema, relation.table),
        # The catalog's own text of an expression, printed for an empty search_path.
        where=sql.SQL(f" where {row_filter}" if row_filter else ""),
    )


class _Sink:
    """What psycopg2 writes COPY's rows into: joins them to chunks, and waits while too many
    wait."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunks: queue.Queue[bytes | None] = queue.Queue(_WAITING_CHUNKS)
        self.failure: BaseException | None = None
        self._chunk_bytes = chunk_bytes
        self._rows: list[bytes] = []
        self._size = 0

    def write(self, row: bytes) -> None:
        self._rows.append(row)
        self._size += len(row)
        if self._size >= self._chunk_bytes:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            chunk = b"".join(self._rows)
            self._rows, self._size = [], 0
            self.chunks.put(chunk)


def _chunks(conn: Connection, statement: str, chunk_bytes: int) -> Iterator[bytes]:
    sink = _Sink(chunk_bytes)

    def run() -> None:
        try:
            with conn.cursor() as cursor:
                cursor.copy_expert(statement, sink)
            sink.flush()
        except BaseException as error:
            sink.failure = error
        finally:
            sink.chunks.put(None)

    reader = threading.Thread(target=run, name="pgcdc copy", daemon=True)
    reader.start()
    finished = False
    try:
        while (chunk := sink.chunks.get()) is not None:
            yield chunk
        finished = True
    finally:
        if not finished:
            with contextlib.suppress(psycopg2.Error):
                conn.cancel()
            while sink.chunks.get() is not None:
                pass
        reader.join()
    if sink.failure is not None:
        raise sink.failure


def reading_failure(
    settings: ConnectionSettings, relation: Relation, error: psycopg2.Error
) -> PgcdcError:
    """Say what keeps a table's rows from being read, without the server's sentence."""
    name, doing = relation.qualified_name, f"reading {relation.qualified_name}"
    role = quoted(settings.describe().rpartition(" as ")[2])
    if "row-level security" in str(error):
        return ConfigurationError(
            reason=f"Table {name} has row-level security, which would hide rows. Let "
            f"this role see all of them with: alter role {role} bypassrls"
        )
    if isinstance(error, InsufficientPrivilege):
        return ConfigurationError(
            reason=f"Table {name} cannot be read by this role. Grant it with: "
            f"grant usage on schema {quoted(relation.schema)} to {role}; grant select on "
            f"{quoted(relation.schema, relation.table)} to {role}"
        )
    # The server's own sentence may quote a value, so only the kind of error is told.
    return statement_failure(settings.describe(), doing, error) or DefiniteError(
        reason=f"Table {name} cannot be read: Postgres reports {type(error).__name__} (SQLSTATE "
        f"{error.pgcode}); the server's log has its sentence."
    )
