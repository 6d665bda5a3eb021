"""Databases of other encodings than the server's databases, and their conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from psycopg2 import sql

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.encodings import _convert
from pgcdc_assets.protocol.encodings import StoredEncoding
from pgcdc_assets_tests.support.database import Database, drop_database


@contextmanager
def encoded_database(database: Database, encoding: str) -> Iterator[Database]:
    """Create a database of an encoding inside the block. A cast stores any bytes as text."""
    found = Database(database.server, f"{database.name}_e")
    database.execute(
        sql.SQL(
            "create database {} encoding {} template template0 lc_collate 'C' lc_ctype 'C'"
        ).format(sql.Identifier(found.name), sql.Literal(encoding))
    )
    # The driver does not know all encodings.
    statement = sql.SQL("alter database {} set client_encoding = 'UTF8'")
    database.execute(statement.format(sql.Identifier(found.name)))
    try:
        # Postgres checks texts at input, except for this cast.
        found.execute("create cast (bytea as text) without function")
        yield found
    finally:
        drop_database(found)


@contextmanager
def converting(server: EmbeddedServer, name: str) -> Iterator[StoredEncoding]:
    """Let the server convert the characters of an encoding. No database needs the encoding."""
    with query_connection(Database(server, "postgres").settings(), "test") as conn:
        yield StoredEncoding(name, partial(_convert, conn, name))
