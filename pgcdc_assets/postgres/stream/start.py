"""The start of a stream: connect by libpq, check the server, and choose the transport.

Protocol: START_REPLICATION in 53.4 Streaming Replication Protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from psycopg import pq

from pgcdc_assets.errors import DefiniteError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import PINNED_SQL, SQL_ASCII, check_pinned
from pgcdc_assets.postgres.libpq import execute, open_session
from pgcdc_assets.postgres.stream.libpq_transport import LibpqWire
from pgcdc_assets.postgres.stream.request import StreamRequest
from pgcdc_assets.postgres.stream.socket_transport import SocketWire
from pgcdc_assets.postgres.stream.stored_encoding import use_stored_encoding
from pgcdc_assets.postgres.stream.tls_transport import start_tls_wire
from pgcdc_assets.postgres.stream.transport import ServerError, Wire, WireSettings
from pgcdc_assets.postgres.wal.timelines import ServerTimeline

# Decoding is a transaction of the server: `transaction_timeout` (PG 17) of the role or the database
# would end a transaction that takes longer to send.
_FACTS = f"""
select (select setting from pg_catalog.pg_settings where name = 'wal_sender_timeout'),
       exists (select from pg_catalog.pg_stat_gssapi
                where pid = pg_catalog.pg_backend_pid() and encrypted),
       pg_catalog.pg_is_in_recovery(),
       (select pg_catalog.set_config(name, '0', false) from pg_catalog.pg_settings
         where name = 'transaction_timeout'),
       {PINNED_SQL}
""".encode()


class StartedStream(NamedTuple):
    """A stream after START_REPLICATION, and what its start has found out about the server.

    Attributes:
        wire: the transport.
        timeline: number of the server's timeline.
        timeline_start: LSN at which the timeline began; None: the first one, or not known.
        is_standby: the server is a standby.
        timeout_seconds: the server's wal_sender_timeout; None: the server has no limit.
    """

    wire: Wire
    timeline: int
    timeline_start: Lsn | None
    is_standby: bool
    timeout_seconds: float | None


def start_stream(
    request: StreamRequest, check_timeline: Callable[[ServerTimeline], None]
) -> StartedStream:
    """Connect and start a stream.

    Args:
        request: the slot, the publication and the LSN.
        check_timeline: function that is called before START_REPLICATION; an error prevents the
            stream.

    Raises:
        ConnectionLost: the server is down, or the connection was lost.
        PgcdcError: the server refused the stream, or `check_timeline` raised an error.
    """
    conn = open_session(request.connection, "capture", replication=True)
    try:
        return _start(conn, request, check_timeline)
    except ServerError as error:
        conn.finish()
        raise request.refused(error) from error
    except OSError as error:
        conn.finish()
        raise request.lost("starting the stream", error) from error
    except BaseException:
        conn.finish()
        raise


def _start(
    conn: pq.abc.PGconn, request: StreamRequest, check_timeline: Callable[[ServerTimeline], None]
) -> StartedStream:
    wire_settings = request.settings.wire
    limit = wire_settings.start_seconds
    facts = execute(conn, _FACTS, limit)
    if facts.status != pq.ExecStatus.TUPLES_OK:
        raise request.lost("starting the stream", facts.get_error_message())
    check_pinned(request.connection, lambda _: None, facts.get_value(0, 4) == b"t")
    timeout_ms, is_gss_encrypted = facts.get_value(0, 0), facts.get_value(0, 1)
    timeline = ServerTimeline.read(request.connection, conn, limit)
    check_timeline(timeline)
    timeline_start = _find_start(timeline)
    encoding = (conn.parameter_status(b"server_encoding") or b"").decode()
    command = request.command(conn.server_version).encode()
    if encoding == SQL_ASCII or request.settings.as_stored:
        # With client_encoding UTF8 the server ends the stream at bytes that are not text.
        command = use_stored_encoding(conn, encoding, command, limit)
    start: Callable[[pq.abc.PGconn, bytes, WireSettings], Wire] = SocketWire
    if conn.ssl_in_use:
        start = start_tls_wire
    elif is_gss_encrypted == b"t":
        start = LibpqWire
    return StartedStream(
        wire=start(conn, command, wire_settings),
        timeline=timeline.number,
        timeline_start=timeline_start,
        is_standby=facts.get_value(0, 2) == b"t",
        timeout_seconds=None if timeout_ms in (None, b"0") else int(timeout_ms) / 1000,
    )


def _find_start(timeline: ServerTimeline) -> Lsn | None:
    try:
        return timeline.starts().get(timeline.number)
    except DefiniteError:
        # The server lacks the history file, which the capture needs after a promotion only.
        return None
