"""Connecting and executing over libpq with a time limit.

libpq's blocking calls have no time limit, and `PGconn.connect` holds Python's global interpreter
lock during the call. Source: Postgres documentation, 32.4 Asynchronous Command Processing.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

import psycopg
from psycopg import pq

from pgcdc_assets.error_text import first_line


def connect(conn: pq.abc.PGconn, timeout_seconds: float) -> bool:
    """Complete a started connection. Return whether the connection is established.

    Args:
        conn: the result of `PGconn.connect_start`.
        timeout_seconds: time limit; 0: no limit, as in libpq.

    Raises:
        TimeoutError: the connection was not established within the limit.
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
        # libpq opens a new socket for the next address of a host: poll the current socket.
        poll = select.poll()
        poll.register(conn.socket, event)
        left_ms = max(0.0, deadline - time.monotonic()) * 1000 if timeout_seconds > 0 else None
        if not poll.poll(left_ms):
            raise TimeoutError(f"no connection in {timeout_seconds:g} s")


def execute(conn: pq.abc.PGconn, command: bytes, timeout_seconds: float) -> pq.abc.PGresult:
    """Run one command and return its result. After CopyBothResponse the COPY remains open.

    Raises:
        TimeoutError: the server did not answer within `timeout_seconds`.
        OSError: the connection was lost.
    """
    return _answer(conn, lambda: conn.send_query(command), timeout_seconds)


def prepare(conn: pq.abc.PGconn, statement: bytes, timeout_seconds: float) -> pq.abc.PGresult:
    """Prepare one statement, which the server analyses and does not execute; return the result.

    The extended protocol refuses several statements in one text.

    Raises:
        TimeoutError: the server did not answer within `timeout_seconds`.
        OSError: the connection was lost.
    """
    return _answer(conn, lambda: conn.send_prepare(b"", statement), timeout_seconds)


def _answer(
    conn: pq.abc.PGconn, send: Callable[[], None], timeout_seconds: float
) -> pq.abc.PGresult:
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
        send()
        result = next_result()
        assert result is not None
        if result.status != pq.ExecStatus.COPY_BOTH:
            while next_result() is not None:
                pass
    except psycopg.OperationalError as error:
        raise OSError(first_line(error)) from error
    return result
