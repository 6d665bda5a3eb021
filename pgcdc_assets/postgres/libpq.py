"""Connecting and executing over libpq with a time limit.

libpq's blocking calls have no time limit, and `PGconn.connect` holds Python's global interpreter
lock during the call. Source: Postgres documentation, 32.4 Asynchronous Command Processing.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from pgcdc_assets.error_text import first_line
from pgcdc_assets.postgres.connection import ConnectionSettings, check_pinned
from pgcdc_assets.postgres.errors import connection_failure

# poll(2) has a C integer of milliseconds.
_LONGEST_POLL_MS = 2**31 - 1


def open_session(
    settings: ConnectionSettings,
    purpose: str,
    *,
    replication: bool = False,
    statement_timeout_ms: int = 0,
    lock_timeout_ms: int = 0,
) -> pq.abc.PGconn:
    """Connect to a source database; the caller finishes the connection.

    Raises:
        ConfigurationError: the settings do not lead to a usable connection.
        ConnectionLost: no server accepted the connection in time.
    """
    conninfo = settings.conninfo_for(
        purpose,
        replication,
        statement_timeout_ms=statement_timeout_ms,
        lock_timeout_ms=lock_timeout_ms,
    )
    try:
        conn = establish(conninfo, settings.connect_seconds())
    except psycopg.OperationalError as error:
        raise connection_failure(settings.describe(), str(error), settings.variable) from error
    try:
        check_pinned(settings, lambda name: _reported(conn, name))
    except BaseException:
        conn.finish()
        raise
    return conn


def _reported(conn: pq.abc.PGconn, name: str) -> str | None:
    value = conn.parameter_status(name.encode())
    return None if value is None else value.decode()


def establish(conninfo: str, timeout_seconds: float) -> pq.abc.PGconn:
    """Return an established connection.

    PQconnectPoll knows all of libpq's rules except `connect_timeout`, a limit for each address.
    After a silent address, libpq therefore gets the addresses that the silent one has left.

    Args:
        conninfo: a connection string.
        timeout_seconds: time limit for each address; 0: no limit, as in libpq.

    Raises:
        psycopg.OperationalError: no server accepted the connection, with libpq's message.
    """
    given, failures = conninfo, ""
    left: Sequence[_Address] | None = None
    while True:
        conn = pq.PGconn.connect_start(given.encode())
        try:
            if _is_established(conn, timeout_seconds):
                return conn
            failures += conn.get_error_message()
        except TimeoutError:
            # libpq's message ends with the address and "failed:".
            failures += f"{conn.get_error_message()} timeout expired\n"
            left = _addresses_left(conn, _addresses(conn) if left is None else left)
            if left:
                conn.finish()
                given = make_conninfo(conninfo, **_Address.parameters(left))
                continue
        except BaseException:
            conn.finish()
            raise
        conn.finish()
        raise psycopg.OperationalError(failures)


def _is_established(conn: pq.abc.PGconn, timeout_seconds: float) -> bool:
    """Complete a started connection. Return whether the connection is established.

    Raises:
        TimeoutError: the current address was silent.
    """
    current, deadline = None, 0.0
    # PQconnectPoll, called before the socket is ready, takes the address for connected: it then
    # ends at a refusal, and does not try the next address.
    state: int = pq.PollingStatus.WRITING
    if conn.status == pq.ConnStatus.BAD:
        return False
    while state in (pq.PollingStatus.READING, pq.PollingStatus.WRITING):
        event = select.POLLIN if state == pq.PollingStatus.READING else select.POLLOUT
        address = _Address.of(conn)
        if address != current:
            current, deadline = address, time.monotonic() + timeout_seconds
        # libpq opens a new socket for the next address of a host: poll the current socket.
        poll = select.poll()
        poll.register(conn.socket, event)
        left_ms = min(max(0.0, deadline - time.monotonic()) * 1000, _LONGEST_POLL_MS)
        if not poll.poll(left_ms if timeout_seconds > 0 else None):
            raise TimeoutError
        state = conn.connect_poll()
    return state == pq.PollingStatus.OK


class _Address(NamedTuple):
    """One address that libpq tries, in the words of a connection string.

    Attributes:
        host: the name, for the certificate and the password file, or a folder of a Unix socket.
        hostaddr: the IP address; empty for a Unix socket.
        port: the port.
    """

    host: str
    hostaddr: str
    port: str

    @classmethod
    def of(cls, conn: pq.abc.PGconn) -> _Address:
        """Return the address that a connection tries."""
        return cls(conn.host.decode(), conn.hostaddr.decode(), conn.port.decode())

    def is_same(self, other: _Address) -> bool:
        """Return whether both lead to one socket. PQhost returns the address without a name."""
        return (self.hostaddr or self.host, self.port) == (
            other.hostaddr or other.host,
            other.port,
        )

    @staticmethod
    def parameters(addresses: Sequence[_Address]) -> dict[str, str]:
        """Return the parameters of a connection string for some addresses."""
        return {
            keyword: ",".join(getattr(address, keyword) for address in addresses)
            for keyword in _Address._fields
        }


def _addresses(conn: pq.abc.PGconn) -> list[_Address]:
    """Return all addresses of a connection's options, services and environment included."""
    lists = {
        option.keyword.decode(): (option.val or b"").decode().split(",") for option in conn.info
    }
    hosts, hostaddrs, ports = (lists[keyword] for keyword in _Address._fields)
    count = max(len(hosts), len(hostaddrs))
    found = []
    for at in range(count):
        # One port counts for all hosts.
        host, hostaddr, port = (
            each[at] if at < len(each) else each[0] if each is ports else ""
            for each in (hosts, hostaddrs, ports)
        )
        is_name = host and not hostaddr and not host.startswith(("/", "@"))
        resolved = _resolve(host) if is_name else [hostaddr]
        found += [_Address(host, each, port) for each in resolved]
    return found


def _resolve(host: str) -> list[str]:
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        # An address has more fields in IPv6, and the text comes first.
        return [str(address[0]) for *_, address in found]
    return []


def _addresses_left(conn: pq.abc.PGconn, addresses: Sequence[_Address]) -> list[_Address]:
    """Return the addresses that libpq would still try after a silent one."""
    silent = _Address.of(conn)
    # A name that now has other addresses, or a default: assume the first one, so that each
    # attempt has fewer addresses.
    at = next((at for at, each in enumerate(addresses) if each.is_same(silent)), 0)
    options = {option.keyword: option.val for option in conn.info}
    # The order of libpq is not known, or libpq tries all addresses twice.
    is_any_order = (
        options.get(b"load_balance_hosts") == b"random"
        or options.get(b"target_session_attrs") == b"prefer-standby"
    )
    earlier = addresses[:at] if is_any_order else []
    return [*earlier, *addresses[at + 1 :]]


def execute(conn: pq.abc.PGconn, command: bytes, timeout_seconds: float) -> pq.abc.PGresult:
    """Run one command and return its result. After CopyBothResponse the COPY remains open.

    Raises:
        TimeoutError: the server did not answer within `timeout_seconds`.
        OSError: the connection was lost.
    """
    return _answer(conn, lambda: conn.send_query(command), timeout_seconds)


def prepare_statement(
    conn: pq.abc.PGconn, statement: bytes, timeout_seconds: float
) -> pq.abc.PGresult:
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
