"""Copy of a table as of an exported snapshot, with the same texts as the replication stream.

COPY writes each value by the output function of its type, as pgoutput does. A cast to text differs
for some types: `true` instead of `t`, char(n) without trailing blanks, an inet without `/32`. A
thread receives rows while the caller decodes and writes earlier chunks. A bounded queue connects
the two, so memory does not grow with the table.
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

# pg_class is read as of the snapshot, pg_relation_filenode() as of now. Different values mean a
# rewrite or a TRUNCATE after the snapshot. A rewritten table is empty in an older snapshot (13.6
# Caveats, https://www.postgresql.org/docs/current/mvcc-caveats.html).
_REWRITTEN = """
select count(*)
  from pg_class c
 where c.relkind = 'r' and c.relfilenode <> 0
   and c.relfilenode is distinct from pg_relation_filenode(c.oid)
   and (c.oid = %s::bigint::oid or c.oid in (select relid from pg_partition_tree(%s::bigint::oid)))
"""


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
    """Yield a table's rows as of a snapshot, in batches with one column `new`.

    `new` has one list of texts per row, in the order of `relation.columns`.

    Args:
        settings: the source database.
        relation: the table with its published columns.
        snapshot_name: name of the exported snapshot.
        is_partitioned: copy the rows of all partitions; if false, the rows of the table only,
            without tables that inherit from the table.
        row_filter: SQL text of the publication's row filter.
        publication: name of the publication; the copy fails if the publication of the table has
            changed since the snapshot.
        chunk_bytes: bytes of COPY text per batch.

    Raises:
        TableChanged: the table or its publication was altered after the snapshot.
        ConfigurationError: the role cannot read the table, or row-level security would hide rows.
        ConnectionLost: the connection was lost.
    """
    with query_connection(settings, "copy", statement_timeout_ms=0) as conn:
        if conn.get_parameter_status("server_encoding") == SQL_ASCII:
            # With client_encoding UTF8 the server refuses to send bytes that are not UTF-8.
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
    """Yield the rows that a publication sends of a table. See `copy_relation`."""
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
        TransientError: the exporting session has ended, and the snapshot with it.
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
                reason=f"Snapshot {snapshot_name} does not exist any more: the session that "
                "exported the snapshot has ended. Run it again."
            ) from error


def lock_unchanged(
    settings: ConnectionSettings,
    conn: Connection,
    relation: Relation,
    query: sql.Composable,
    publication: str = "",
) -> None:
    """Lock the table against ALTER TABLE, then check that it is unchanged since the snapshot.

    The server decodes each change with the catalog as of the change. If a table joins the
    publication after the snapshot, some changes are missing from both the copy and the stream:
    these changes commit after the snapshot and before the publication of the table.

    Raises:
        TableChanged: the table or its publication was altered after the snapshot.
    """
    relation_id = relation.relation_id
    with conn.cursor() as cursor:
        # The query takes the lock with the same privileges as the copy. LOCK TABLE would require a
        # privilege on the whole table instead of the published columns.
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
    """Return the query of the rows and columns that a publication sends of a table."""
    return sql.SQL("select {columns} from {only} {table}{where}").format(
        columns=sql.SQL(", ").join(sql.Identifier(column.name) for column in relation.columns),
        only=sql.SQL("" if is_partitioned else "only"),
        table=sql.Identifier(relation.schema, relation.table),
        # The text of pg_get_expr() with an empty search_path: every name has its schema.
        where=sql.SQL(f" where {row_filter}" if row_filter else ""),
    )


class _Sink:
    """File-like target of psycopg2's COPY: joins rows to chunks, and blocks at a full queue."""

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
    """Return the error for rows that cannot be read, without the server's sentence.

    The server's sentence may contain a value of a row.
    """
    name, doing = relation.qualified_name, f"reading {relation.qualified_name}"
    role = quoted(settings.describe().rpartition(" as ")[2])
    if "row-level security" in str(error):
        return ConfigurationError(
            reason=f"Table {name} has row-level security, which would hide rows. Allow "
            f"this role to read all rows with: alter role {role} bypassrls"
        )
    if isinstance(error, InsufficientPrivilege):
        return ConfigurationError(
            reason=f"Table {name} cannot be read by this role. Grant it with: "
            f"grant usage on schema {quoted(relation.schema)} to {role}; grant select on "
            f"{quoted(relation.schema, relation.table)} to {role}"
        )
    # The server's sentence may contain a value: name the class of the error only.
    return statement_failure(settings.describe(), doing, error) or DefiniteError(
        reason=f"Table {name} cannot be read: Postgres reports {type(error).__name__} (SQLSTATE "
        f"{error.pgcode}). Read the full message in the server's log."
    )
