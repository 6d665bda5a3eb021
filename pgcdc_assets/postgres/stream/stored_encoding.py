"""A replication connection that receives texts as stored, in the encoding of its database."""

from __future__ import annotations

from psycopg import pq

from pgcdc_assets.postgres.connection import SQL_ASCII
from pgcdc_assets.postgres.libpq import execute


def use_stored_encoding(
    conn: pq.abc.PGconn, encoding: str, command: bytes, seconds: float
) -> bytes:
    """Set the client's encoding to the database's, and return a command in this encoding.

    Args:
        conn: a connection whose client encoding is UTF8.
        encoding: the encoding of its database.
        command: the command in UTF-8.
        seconds: time limit of each statement.

    Raises:
        OSError: the server does not execute the statements.
    """
    if encoding != SQL_ASCII and not command.isascii():
        # Names of slots are ASCII, and names of publications are not.
        text = pq.Escaping(conn).escape_literal(command)
        statement = b"select pg_catalog.convert_to(%s, '%s')" % (text, encoding.encode())
        shown = _run(conn, statement, seconds, pq.ExecStatus.TUPLES_OK).get_value(0, 0)
        assert shown is not None
        command = bytes.fromhex(shown.decode().removeprefix("\\x"))
    statement = b"set client_encoding = '%s'" % encoding.encode()
    _run(conn, statement, seconds, pq.ExecStatus.COMMAND_OK)
    return command


def _run(
    conn: pq.abc.PGconn, statement: bytes, seconds: float, wanted: pq.ExecStatus
) -> pq.abc.PGresult:
    result = execute(conn, statement, seconds)
    if result.status != wanted:
        raise OSError(result.get_error_message())
    return result
