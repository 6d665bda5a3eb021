"""A heartbeat: one WAL record of our own that logical decoding sees as a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

PREFIX = "pgcdc"


def emit_heartbeat(conn: Connection) -> None:
    """Write an empty logical message in a transaction of its own.

    A message outside a transaction would not let a slot advance (PeerDB-io/peerdb#3904).
    Needs a primary, and no privilege.
    """
    with conn.cursor() as cursor:
        cursor.execute("select pg_logical_emit_message(true, %s, '')", (PREFIX,))
