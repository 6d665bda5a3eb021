"""The start of a replication connection over our own TLS.

libpq has connected first, by all its rules: hosts, sslmode, passwords, services. This module
connects once more, to the address that libpq has reached, with the options that libpq has resolved,
and verifies at least as much. Postgres documentation: 53.2.1 Start-up, 53.2.10 SSL Session
Encryption, 53.3 SASL Authentication.
"""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import struct
import time
from dataclasses import dataclass
from socket import create_connection

from psycopg import pq

from pgcdc_assets.postgres.libpq import execute
from pgcdc_assets.postgres.stream.scram import SCRAM, SCRAM_PLUS, ScramClient
from pgcdc_assets.postgres.stream.socket_transport import server_error
from pgcdc_assets.postgres.stream.tls_channel import TlsChannel
from pgcdc_assets.postgres.stream.tls_settings import TlsSettings
from pgcdc_assets.postgres.stream.transport import LibpqRequired, WireSettings

_SSL_REQUEST = struct.pack("!II", 8, 80877103)
_PROTOCOL_3_0 = 196608
_MAX_MESSAGE_BYTES = 1024 * 1024

_OK, _CLEARTEXT, _MD5, _SASL, _SASL_CONTINUE, _SASL_FINAL = 0, 3, 5, 10, 11, 12

# Options of libpq that are options of the socket (Postgres documentation, 32.1.2), where the system
# has them.
_SOCKET_OPTIONS = {
    "keepalives_idle": "TCP_KEEPIDLE",
    "keepalives_interval": "TCP_KEEPINTVL",
    "keepalives_count": "TCP_KEEPCNT",
    "tcp_user_timeout": "TCP_USER_TIMEOUT",
}


@dataclass(frozen=True)
class TlsSession:
    """An established replication connection.

    Attributes:
        channel: the encrypted connection.
        backend_pid: pid of the walsender.
    """

    channel: TlsChannel
    backend_pid: int


def start_session(conn: pq.abc.PGconn, settings: WireSettings) -> TlsSession:
    """Open a second connection to the server of a replication connection.

    Args:
        conn: an established replication connection that libpq encrypts by TLS.
        settings: time limits.

    Raises:
        LibpqRequired: an option or an authentication is not available here, or the second
            connection reached another server.
        OSError: the connection failed, or the server was not verified.
    """
    try:
        return _start_session(conn, settings)
    except OSError:
        # A refused certificate is a ValueError too.
        raise
    except (ValueError, LookupError, struct.error) as error:
        # A name that is no host name for `ssl`, or a malformed message. The text may hold a secret.
        raise LibpqRequired("an option or a message of the start is malformed") from error


def _start_session(conn: pq.abc.PGconn, settings: WireSettings) -> TlsSession:
    options = {
        option.keyword.decode(): option.val.decode()
        for option in conn.info
        if option.val is not None
    }
    tls = TlsSettings.of(options, conn.host.decode())
    limit = float(options.get("connect_timeout") or 0)
    seconds = min(limit, settings.start_seconds) if limit > 0 else settings.start_seconds
    deadline = time.monotonic() + seconds
    address = (conn.hostaddr.decode(), int(conn.port))
    with contextlib.ExitStack() as at_failure:
        source = at_failure.enter_context(create_connection(address, seconds))
        _set_options(source, options)
        start = _Start(conn, options, source, tls, deadline)
        start.encrypt()
        session = TlsSession(start.channel, start.authenticate())
        expected = execute(conn, b"IDENTIFY_SYSTEM", settings.start_seconds)
        found = start.first_row(b"IDENTIFY_SYSTEM")
        # System identifier and timeline. A load balancer may lead to two servers.
        if found[:2] != [expected.get_value(0, 0), expected.get_value(0, 1)]:
            raise LibpqRequired("a second connection to the address reached another server")
        at_failure.pop_all()
        return session


def _set_options(source: socket.socket, options: dict[str, str]) -> None:
    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if options.get("keepalives", "1") != "0":
        source.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for keyword, name in _SOCKET_OPTIONS.items():
        option, value = getattr(socket, name, None), int(options.get(keyword) or 0)
        if option is not None and value > 0:
            source.setsockopt(socket.IPPROTO_TCP, option, value)


class _Start:
    """The messages until the connection is ready, with one time limit."""

    def __init__(
        self,
        conn: pq.abc.PGconn,
        options: dict[str, str],
        source: socket.socket,
        tls: TlsSettings,
        deadline: float,
    ) -> None:
        self._conn = conn
        self._options = options
        self._socket = source
        self._is_direct = tls.is_direct
        self._deadline = deadline
        self._binding = options.get("channel_binding") or "prefer"
        self._readable = select.poll()
        self._readable.register(source, select.POLLIN)
        self._received = bytearray()
        self._room = memoryview(bytearray(16 * 1024))
        self._scram: ScramClient | None = None
        self._is_bound = False
        self.channel = TlsChannel(source, tls)

    def encrypt(self) -> None:
        """Negotiate TLS. There is no connection without it."""
        if not self._is_direct:
            self._socket.sendall(_SSL_REQUEST)
            self._wait()
            # One byte only: bytes that arrive in clear text behind it are no part of the session
            # (CVE-2021-23222).
            if self._socket.recv(1) != b"S":
                raise LibpqRequired("the server refused to encrypt a second connection")
        self.channel.shake_hands(self._wait)

    def authenticate(self) -> int:
        """Send the startup message, authenticate, and return the pid of the walsender."""
        options = self._options
        parameters = {
            "user": self._conn.user.decode(),
            "database": self._conn.db.decode(),
            "replication": options["replication"],
            "options": options.get("options", ""),
            "application_name": options.get("application_name", ""),
            # libpq's connection may have changed the encoding since its start.
            "client_encoding": (self._conn.parameter_status(b"client_encoding") or b"").decode(),
        }
        if self._conn.server_version >= 170000:
            # See `start_stream`, whose setting applies to libpq's connection.
            parameters["transaction_timeout"] = "0"
        pairs = "".join(f"{key}\0{value}\0" for key, value in parameters.items() if value)
        body = struct.pack("!I", _PROTOCOL_3_0) + pairs.encode() + b"\0"
        self.channel.send(struct.pack("!I", len(body) + 4) + body)
        pid, is_authenticated = 0, False
        while True:
            kind, payload = self._message()
            if kind == b"R" and not is_authenticated:
                is_authenticated = self._answer(payload)
            elif kind == b"K" and is_authenticated:
                pid = struct.unpack_from("!I", payload)[0]
            elif kind == b"Z" and is_authenticated:
                return pid
            elif kind not in (b"S", b"N"):
                raise LibpqRequired("the server's start differs from protocol version 3.0")

    def first_row(self, command: bytes) -> list[bytes | None]:
        """Run a command, and return the values of its first row."""
        self.channel.send(b"Q" + struct.pack("!I", len(command) + 5) + command + b"\0")
        row: list[bytes | None] = []
        while True:
            kind, payload = self._message()
            if kind == b"D" and not row:
                row = _row_values(payload)
            elif kind == b"Z":
                return row

    def _answer(self, payload: bytes) -> bool:
        """Reply to an authentication request. Return whether the server is satisfied."""
        request, body = struct.unpack_from("!I", payload)[0], payload[4:]
        scram = self._scram
        if request == _OK:
            if scram is not None and not scram.is_verified:
                raise ConnectionError("the server ended the authentication without its signature")
            if self._binding == "require" and not self._is_bound:
                raise LibpqRequired("channel_binding=require, but the channel was not bound")
            return True
        if request == _SASL and scram is None:
            self._begin_scram(body.split(b"\0"))
        elif request == _SASL_CONTINUE and scram is not None:
            self._send_password(scram.answer(body))
        elif request == _SASL_FINAL and scram is not None:
            scram.verify(body)
        elif self._binding == "require":
            raise LibpqRequired("channel_binding=require, but the server asks for no SCRAM")
        elif request == _CLEARTEXT:
            self._send_password(self._password() + b"\0")
        elif request == _MD5:
            inner = hashlib.md5(self._password() + self._conn.user, usedforsecurity=False)
            digest = hashlib.md5(inner.hexdigest().encode() + body, usedforsecurity=False)
            self._send_password(b"md5" + digest.hexdigest().encode() + b"\0")
        else:
            raise LibpqRequired(f"the server asks for authentication method {request}")
        return False

    def _begin_scram(self, offered: list[bytes]) -> None:
        can_bind = self._binding != "disable"
        certificate = self.channel.certificate()
        if can_bind and SCRAM_PLUS.encode() in offered and certificate is not None:
            mechanism, bound = SCRAM_PLUS, certificate
        elif SCRAM.encode() in offered and self._binding != "require":
            mechanism, bound = SCRAM, None
        else:
            raise LibpqRequired("the server offers no SCRAM that the options allow")
        password = self._password().decode(errors="replace")
        self._scram = ScramClient(password, bound, is_binding_possible=can_bind)
        self._is_bound = bound is not None
        first = self._scram.first()
        self._send_password(mechanism.encode() + b"\0" + struct.pack("!I", len(first)) + first)

    def _password(self) -> bytes:
        if not self._conn.password:
            raise LibpqRequired("the server asks for a password, and none is set")
        return self._conn.password

    def _send_password(self, payload: bytes) -> None:
        self.channel.send(b"p" + struct.pack("!I", len(payload) + 4) + payload)

    def _message(self) -> tuple[bytes, bytes]:
        """Return type and payload of the next message."""
        received = self._received
        while True:
            if len(received) >= 5:
                length = struct.unpack_from("!I", received, 1)[0]
                if not 4 <= length <= _MAX_MESSAGE_BYTES:
                    raise ConnectionError(f"the length {length} of a message is impossible")
                if len(received) > length:
                    kind, payload = bytes(received[:1]), bytes(received[5 : 1 + length])
                    del received[: 1 + length]
                    if kind == b"E":
                        raise ConnectionError(server_error(payload).message)
                    return kind, payload
            if not self.channel.has_rest:
                self._wait()
                if self.channel.is_ended or self.channel.receive() == 0:
                    raise ConnectionResetError("the server closed the connection")
            received += self._room[: self.channel.read_into(self._room)]

    def _wait(self) -> None:
        if not self._readable.poll(max(0.0, self._deadline - time.monotonic()) * 1000):
            raise TimeoutError("a second connection was not established in time")


def _row_values(payload: bytes) -> list[bytes | None]:
    """Return the values of a DataRow (53.7 Message Formats)."""
    values: list[bytes | None] = []
    at = 2
    for _ in range(struct.unpack_from("!H", payload)[0]):
        size = struct.unpack_from("!i", payload, at)[0]
        at += 4
        values.append(None if size < 0 else payload[at : at + size])
        at += max(0, size)
    return values
