"""A server with TLS, and a TLS front of a server without TLS."""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg2.extensions
import pytest
from psycopg import pq

from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.postgres.stream import tls_start, tls_transport
from pgcdc_assets_tests.support.certificates import Certificates
from pgcdc_assets_tests.support.database import Database, create_database, drop_database
from pgcdc_assets_tests.support.server_folder import new_server_folder
from pgcdc_assets_tests.support.waits import wait_until

# The embedded servers are built without SSL.
VERSION = 15

_SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"

# The roles and the lines of pg_hba.conf for each way of authentication.
_ROLES = """
create role scram_user login replication superuser password 'sesame';
set password_encryption = 'md5';
create role md5_user login replication superuser password 'sesame';
reset password_encryption;
create role clear_user login replication superuser password 'sesame';
create role cert_user login replication superuser;
create role reader login password 'sesame';
"""
_RULES = """
hostssl all scram_user 127.0.0.1/32 scram-sha-256
host all scram_user 127.0.0.1/32 reject
hostssl all md5_user 127.0.0.1/32 md5
hostssl all clear_user 127.0.0.1/32 password
hostssl all cert_user 127.0.0.1/32 cert
hostssl all reader 127.0.0.1/32 scram-sha-256
host all reader 127.0.0.1/32 reject
"""


class TlsServer:
    """A Postgres server that requests no encryption and offers it."""

    def __init__(self, server: EmbeddedServer, certificates: Certificates) -> None:
        self.server = server
        self.certificates = certificates

    def conninfo(self, database: Database, options: str = "") -> str:
        """Return a connection string with a checked host name."""
        where = f"host=localhost hostaddr=127.0.0.1 port={self.server.port}"
        return f"{where} dbname={database.name} user=postgres sslmode=require {options}"

    def serve(self, name: str) -> None:
        """Serve new connections with another certificate."""
        for suffix in ("crt", "key"):
            self._install(f"{name}.{suffix}", f"server.{suffix}")
        if not self.server.is_running:
            return
        expected = ssl.PEM_cert_to_DER_cert(Path(self.certificates.path(f"{name}.crt")).read_text())
        Database(self.server, "postgres").execute("select pg_reload_conf()")
        wait_until(lambda: self._served() == expected, f"the certificate {name}")

    def _install(self, source: str, target: str) -> None:
        path = self.server.data_dir / target
        shutil.copy(self.certificates.path(source), path)
        path.chmod(0o600)
        owner = self.server.data_dir.stat()
        shutil.chown(path, owner.st_uid, owner.st_gid)

    def _served(self) -> bytes | None:
        with _started_tls("127.0.0.1", self.server.port) as connection:
            return connection.getpeercert(binary_form=True)

    def start(self) -> None:
        """Create the cluster, and start it with TLS."""
        self.server.start()
        Database(self.server, "postgres").execute(_ROLES)
        self.server.stop()
        self._install("root.crt", "root.crt")
        self.serve("good")
        hba = self.server.data_dir / "pg_hba.conf"
        hba.write_text(_RULES + hba.read_text())
        self.server.settings |= {"ssl": "on", "ssl_ca_file": "root.crt"}
        self.server.start()


def _started_tls(host: str, port: int) -> ssl.SSLSocket:
    """Connect without a check of the certificate."""
    connection = socket.create_connection((host, port))
    connection.sendall(_SSL_REQUEST)
    assert connection.recv(1) == b"S"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)


class TlsFront:
    """Proxy that decrypts the connections of clients.

    Args:
        target: address of the server.
        certificates: the front serves the certificate `good`.
        is_target_encrypted: encrypt the connections to the server too.
        protocols: the protocols of ALPN that the front negotiates.
        reply: reply to the request for encryption.

    Attributes:
        names: the host name that each client has sent (SNI); None for a client that sent no name.
    """

    def __init__(
        self,
        target: tuple[str, int],
        certificates: Certificates,
        *,
        is_target_encrypted: bool = False,
        protocols: tuple[str, ...] = ("postgresql",),
        reply: bytes = b"S",
    ) -> None:
        self.target = target
        self._is_target_encrypted = is_target_encrypted
        self._reply = reply
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.path("good.crt"), certificates.path("good.key"))
        self._context.set_alpn_protocols(list(protocols))
        self.names: list[str | None] = []
        self._context.sni_callback = lambda _connection, name, _context: self.names.append(name)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connection_count = 0
        threading.Thread(target=self._accept, daemon=True, name="front").start()

    def close(self) -> None:
        # shutdown() wakes accept(); close() does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connection_count += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True, name="front").start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            first = client.recv(1, socket.MSG_PEEK)
            if not first:
                return
            if first != b"\x16":
                assert client.recv(8, socket.MSG_WAITALL) == _SSL_REQUEST
                client.sendall(self._reply)
            with (
                self._context.wrap_socket(client, server_side=True) as outer,
                _started_tls(*self.target)
                if self._is_target_encrypted
                else socket.create_connection(self.target) as inner,
            ):
                self._pass(outer, inner)
                # The end of the server arrives with close_notify.
                outer.settimeout(1)
                outer.unwrap()

    @staticmethod
    def _pass(outer: ssl.SSLSocket, inner: socket.socket) -> None:
        # One thread, because OpenSSL's object serves one thread at a time.
        while True:
            for source in select.select([outer, inner], [], [])[0]:
                sink = inner if source is outer else outer
                is_first = True
                while is_first or (isinstance(source, ssl.SSLSocket) and source.pending()):
                    is_first = False
                    gulp = source.recv(64 * 1024)
                    if not gulp:
                        return
                    sink.sendall(gulp)


@contextlib.contextmanager
def tls_fronts(certificates: Certificates, **options: Any) -> Iterator[list[TlsFront]]:
    """Put a front before the target of each encrypted connection inside the block.

    The stream may not fall back to libpq. Yields the fronts.
    """
    fronts: list[TlsFront] = []
    connect = socket.create_connection

    def connect_to_front(address: tuple[str, int], timeout: float) -> socket.socket:
        fronts.append(TlsFront(address, certificates, **options))
        return connect(("127.0.0.1", fronts[-1].port), timeout)

    with (
        mock.patch.object(tls_start, "create_connection", connect_to_front),
        mock.patch.object(tls_transport, "LibpqWire", refuse),
    ):
        yield fronts
    for front in fronts:
        front.close()


def needs_libpq(version: int) -> pytest.MarkDecorator:
    """Skip a test whose connection options the installed libpq does not know."""
    installed = min(psycopg2.extensions.libpq_version(), pq.version()) // 10000
    return pytest.mark.skipif(
        installed < version, reason=f"libpq {installed} has no options of libpq {version}"
    )


def refuse(*arguments: object) -> None:
    """Fail, in the place of a transport."""
    raise AssertionError("the stream was read by another transport")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def shared_tls_server(certificates: Certificates) -> Iterator[TlsServer]:
    # The server's user cannot read pytest's temporary folder.
    folder = new_server_folder("tls") / "data"
    server = TlsServer(EmbeddedServer(folder, VERSION, UNSAFE_BUT_FAST), certificates)
    try:
        server.start()
        yield server
    finally:
        server.server.remove()
        folder.parent.rmdir()


@pytest.fixture
def tls_server(shared_tls_server: TlsServer) -> Iterator[TlsServer]:
    """Return a server with the certificate `good`, which the test may replace."""
    yield shared_tls_server
    shared_tls_server.serve("good")


@pytest.fixture
def tls_database(tls_server: TlsServer) -> Iterator[Database]:
    """Return a new database of the server with TLS."""
    database = create_database(tls_server.server)
    yield database
    drop_database(database)
