"""What libpq does in one blocking call, with a limit of time.

Its blocking calls wait for ever for a server that stands still, and `PGconn.connect` holds the
interpreter's lock meanwhile.
"""

from __future__ import annotations

import select
import time

import psycopg
from psycopg import pq


def connect(conn: pq.abc.PGconn, timeout_seconds: float) -> bool:
    """Complete a connection; say whether it stands.

    Args:
        timeout_seconds: 0 is no limit, as in libpq.

    Raises:
        TimeoutError: there was no connection in that time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        match conn.connect_poll() if conn.status != pq.ConnStatus.BAD else None:
            case pq.PollingStatus.OK:
                return True
            case pq.PollingStatus.READING:
                event = select.POLLIN
            case pq.PollingStatus.WRITING:
                event = select.POLLOUT
            case _:
                return False
        # Another address of the host has another socket.
        poll = select.poll()
        poll.register(conn.socket, event)
        left_ms = max(0.0, deadline - time.monotonic()) * 1000 if timeout_seconds > 0 else None
        if not poll.poll(left_ms):
            raise TimeoutError(f"no connection in {timeout_seconds:g} s")


def execute(conn: pq.abc.PGconn, command: bytes, timeout_seconds: float) -> pq.abc.PGresult:
    """Run one command and give its result; a COPY that it begins is left open.

    Raises:
        TimeoutError: the server did not answer in that time.
        OSError: the connection broke.
    """
    deadline = time.monotonic() + timeout_seconds
    readable = select.poll()
    readable.register(conn.socket, select.POLLIN)

    def next_result() -> pq.abc.PGresult | None:
        while conn.is_busy():
            if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no answer in {timeout_seconds:g} s")
            conn.consume_input()
        return conn.get_result()

    try:
        conn.send_query(command)
        result = next_result()
        assert result is not None
        if result.status != pq.ExecStatus.COPY_BOTH:
            while next_result() is not None:
                pass
    except psycopg.OperationalError as error:
        raise OSError(first_line(error)) from error
    return result


def first_line(error: Exception) -> str:
    """Shorten an error of libpq's."""
    return str(error).partition("\n")[0]
