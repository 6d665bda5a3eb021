"""Transport over our own TLS, without libpq."""

from __future__ import annotations

import logging
import struct
import time

from psycopg import pq

from pgcdc_assets.postgres.stream.libpq_transport import LibpqWire
from pgcdc_assets.postgres.stream.socket_transport import SocketWire
from pgcdc_assets.postgres.stream.tls_start import TlsSession, start_session
from pgcdc_assets.postgres.stream.transport import LibpqRequired, Wire, WireSettings
from pgcdc_assets.protocol.frames import SLACK_BYTES

_logger = logging.getLogger(__name__)


def start_tls_wire(conn: pq.abc.PGconn, command: bytes, settings: WireSettings) -> Wire:
    """Start the stream over a connection that libpq encrypts by TLS.

    The transport is a second connection under our own TLS, or the given connection, if libpq is
    required or the second connection failed for any reason. Both verify the server as the options
    of `conn` say.

    Args:
        conn: an established replication connection.
        command: START_REPLICATION.
        settings: sizes and time limits.

    Raises:
        ServerError: the server refused the command.
        OSError: the connection was lost.
    """
    try:
        session = start_session(conn, settings)
    except (LibpqRequired, OSError) as error:
        _logger.info("The stream is read through libpq, which costs more CPU: %s.", error)
        return LibpqWire(conn, command, settings)
    return TlsWire(conn, session, command, settings)


class TlsWire(SocketWire):
    """Transport over a connection that the package encrypts. See `Wire`.

    Args:
        conn: libpq's connection, which is closed: the server has few walsenders.
        session: the established connection.
        command: START_REPLICATION.
        settings: sizes and time limits.
    """

    def __init__(
        self, conn: pq.abc.PGconn, session: TlsSession, command: bytes, settings: WireSettings
    ) -> None:
        conn.finish()
        self._conn = conn
        self._channel = session.channel
        self._prepare(session.channel.socket, session.backend_pid, settings)
        self._start(command)

    def close(self) -> None:
        self._channel.close()

    def _wait(self) -> bool:
        return self._channel.has_rest or super()._wait()

    def _take(self, flags: int = 0) -> bool:
        if not self._room or self._is_at_end:
            return False
        if not self._channel.has_rest:
            try:
                # A record is longer than its content, so the buffer has room for all records but
                # an earlier, incomplete one.
                self._is_at_end = self._channel.receive(flags, self._room) == 0
            except BlockingIOError:
                return False
            self.heard_at = time.monotonic()
        place = memoryview(self._buffer.data)[self._filled : len(self._buffer) - SLACK_BYTES]
        count = self._channel.read_into(place)
        self._is_at_end = self._is_at_end or self._channel.is_ended
        self._filled += count
        self.bytes_received += count
        return not self._is_at_end

    def _send_frame(self, kind: bytes, payload: bytes) -> None:
        self._channel.send(kind + struct.pack("!I", len(payload) + 4) + payload)
