"""Cancellation of a statement that another thread runs, with a time limit.

`connection.cancel` of psycopg2 waits without a limit until the server has closed the connection of
the request, and holds the interpreter lock during the wait. If the server does not answer, all
threads of the process are blocked. `pg_cancel_backend` over a connection of `libpq.py` sends the
same signal.

Source: Postgres documentation, 9.28.2 Server Signaling Functions, and 32.7 Canceling Queries in
Progress.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import psycopg2
from psycopg import pq
from psycopg.conninfo import make_conninfo

from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.libpq import establish, execute

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_LIMIT_SECONDS = 2.0

# SO_LINGER of zero seconds (socket(7)).
_RESET = struct.pack("ii", 1, 0)

# Behind a pooler, or with a host name of several servers, the process may be that of another
# client.
_CANCEL = """
select pg_catalog.pg_cancel_backend(pid) from pg_catalog.pg_stat_activity
 where pid = {pid} and application_name = {application}
"""


def cancel_statement(settings: ConnectionSettings, connection: Connection) -> bool:
    """Ask the server to cancel the statement of a session, if the session runs one.

    Args:
        settings: the server and role of the session.
        connection: the session, in the hands of another thread.

    Returns:
        Whether the server sent the signal. It did not if it is not available, does not answer
        within seconds, or has no such session any more.
    """
    request = _request(settings, connection)
    return request is not None and _send(request)


def end_session(settings: ConnectionSettings, connection: Connection) -> None:
    """End the statement of a session at once, and with it the session.

    The other thread gets a lost connection, whether or not the server answers. The server stops
    because of the signal, or when it writes to the connection.
    """
    # Read before the cut, after which the other thread closes its connection.
    request = _request(settings, connection)
    cut_connection(connection)
    if request is not None:
        _send(request)


def cut_connection(connection: Connection) -> None:
    """Cut the connection of a session: the other thread gets a lost connection at once."""
    with contextlib.suppress(psycopg2.Error, OSError), _socket(connection) as shared:
        # Closed by a reset: after a mere FIN, a server may wait for minutes for room in the receive
        # buffer.
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        shared.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class _Request:
    """A session to cancel.

    Attributes:
        settings: its settings.
        server: the parameters of the connection string that lead to its server.
        pid: its process.
        application: its `application_name`.
    """

    settings: ConnectionSettings
    server: Mapping[str, str]
    pid: int
    application: str


def _request(settings: ConnectionSettings, connection: Connection) -> _Request | None:
    """Return the request for a session; None if its thread has closed it."""
    try:
        server, pid = _same_server(connection), connection.get_backend_pid()
        application = connection.get_parameter_status("application_name") or ""
    except (psycopg2.Error, OSError):
        return None
    return _Request(settings, server, pid, application)


def _send(request: _Request) -> bool:
    conninfo = make_conninfo(request.settings.conninfo_for("cancel"), **request.server)
    try:
        conn = establish(conninfo, _LIMIT_SECONDS)
    except psycopg.OperationalError:
        return False
    try:
        application = bytes(pq.Escaping(conn).escape_literal(request.application.encode()))
        statement = _CANCEL.format(pid=request.pid, application=application.decode())
        answer = execute(conn, statement.encode(), _LIMIT_SECONDS)
        return answer.status == pq.ExecStatus.TUPLES_OK and answer.get_value(0, 0) == b"t"
    except (OSError, psycopg.Error):
        return False
    finally:
        conn.finish()


def _same_server(connection: Connection) -> dict[str, str]:
    """Return the parameters that lead to the server of a session, of several in its settings."""
    info = connection.info
    where = {"host": info.host, "port": str(info.port)}
    with _socket(connection) as shared:
        is_local = shared.family == socket.AF_UNIX
        return where | {"hostaddr": "" if is_local else shared.getpeername()[0]}


def _socket(connection: Connection) -> socket.socket:
    """Return a second descriptor of a session's socket."""
    return socket.socket(fileno=os.dup(connection.fileno()))
