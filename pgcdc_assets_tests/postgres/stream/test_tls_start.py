"""The second connection of a stream verifies the server and authenticates as libpq does.

libpq connects first. What changes between the two connections is what an attacker could change.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import pq

from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.local import free_port
from pgcdc_assets.postgres.libpq import establish
from pgcdc_assets.postgres.stream.tls_channel import TlsChannel
from pgcdc_assets.postgres.stream.tls_settings import TlsSettings
from pgcdc_assets.postgres.stream.tls_start import start_session
from pgcdc_assets.postgres.stream.transport import LibpqRequired, WireSettings
from pgcdc_assets_tests.support.certificates import Certificates
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.tls_server import (
    VERSION,
    TlsFront,
    TlsServer,
    needs_libpq,
    tls_fronts,
)
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(binaries(VERSION) is None, reason="embedded servers have no SSL"),
]


@contextlib.contextmanager
def libpq(conninfo: str) -> Iterator[pq.abc.PGconn]:
    """Connect a replication connection through libpq."""
    conn = establish(f"{conninfo} replication=database", 30)
    try:
        yield conn
    finally:
        conn.finish()


def start(conn: pq.abc.PGconn, start_seconds: float = 30.0) -> int:
    """Start and close a session. Return the pid of its walsender."""
    session = start_session(conn, WireSettings(start_seconds=start_seconds))
    session.channel.close()
    return session.backend_pid


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty home folder, where libpq looks for its default files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".postgresql"
    folder.mkdir()
    return folder


_VERIFIED = ("expired", "unknown", "revoked")


@pytest.mark.sampled
@pytest.mark.usefixtures("home")
def test_the_second_connection_verifies_the_server_as_libpq_does(
    tls_server: TlsServer, tls_database: Database
) -> None:
    """The server's certificate changes between the connections, for each sslmode."""
    root = tls_server.certificates.path("root.crt")
    revoked = f"sslcrl={tls_server.certificates.path('revoked.crl')}"
    refused_by = {
        "sslmode=prefer": (),
        "sslmode=allow sslrootcert=/nowhere": (),
        "sslmode=require": (),
        f"sslmode=require sslrootcert={root} {revoked}": _VERIFIED,
        f"sslmode=verify-ca sslrootcert={root} {revoked}": _VERIFIED,
        f"sslmode=verify-ca sslrootcert={root}": ("expired", "unknown"),
        f"sslmode=verify-full sslrootcert={root} {revoked}": (*_VERIFIED, "wrong_name"),
    }
    with contextlib.ExitStack() as stack:
        conns = {}
        for options in refused_by:
            user = "user=scram_user password=sesame" if "allow" in options else ""
            conninfo = tls_server.conninfo(tls_database, f"{options} {user}")
            conns[options] = stack.enter_context(libpq(conninfo))
        outcomes: dict[str, list[str]] = {options: [] for options in refused_by}
        for name in ("expired", "unknown", "revoked", "wrong_name", "good", "ecdsa"):
            tls_server.serve(name)
            for options, conn in conns.items():
                assert conn.ssl_in_use
                try:
                    assert start(conn) > 0
                except OSError as error:
                    assert "CERTIFICATE_VERIFY_FAILED" in str(error)
                    outcomes[options].append(name)
    assert outcomes == {options: list(names) for options, names in refused_by.items()}


def test_default_files_and_the_environment_count_as_for_libpq(
    tls_server: TlsServer, tls_database: Database, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conninfo = tls_server.conninfo(tls_database)
    (home / "root.crt").write_bytes(Path(tls_server.certificates.path("root.crt")).read_bytes())
    service = home / "services"
    service.write_text("[tls]\nsslmode=verify-full\n")
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    named = conninfo.replace("sslmode=require", "service=tls")
    with libpq(conninfo) as by_file, libpq(named) as by_service:
        tls_server.serve("wrong_name")
        assert start(by_file) > 0
        with pytest.raises(OSError, match="Hostname mismatch"):
            start(by_service)
        tls_server.serve("unknown")
        for conn in (by_file, by_service):
            with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
                start(conn)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "ssl_max_protocol_version=TLSv1.2",
        "ssl_min_protocol_version=TLSv1.3",
        "user=scram_user password=sesame channel_binding=require",
        "user=scram_user password=sesame channel_binding=disable",
        "user=scram_user password=sesame channel_binding=require ssl_max_protocol_version=TLSv1.2",
        "user=md5_user password=sesame",
        "user=clear_user password=sesame",
        "user=cert_user sslcert={0}/cert_user.crt sslkey={0}/cert_user.key",
        "user=cert_user sslcert={0}/cert_user.crt sslkey={0}/locked.key sslpassword=sesame",
        "sslsni=0 sslrootcert={0}/root.crt",
    ],
)
def test_each_way_of_authentication_starts_a_session(
    tls_server: TlsServer, tls_database: Database, options: str
) -> None:
    folder = tls_server.certificates.folder
    with libpq(tls_server.conninfo(tls_database, options.format(folder))) as conn:
        session = start_session(conn, WireSettings())
        used = tls_database.query(
            "select ssl, version from pg_stat_ssl where pid = %s", (session.backend_pid,)
        )
        session.channel.close()
    expected = "TLSv1.2" if "max_protocol" in options else "TLSv1.3"
    assert [tuple(row) for row in used] == [(True, expected)]


def test_the_channel_is_bound_to_the_certificate_of_each_algorithm(
    tls_server: TlsServer, tls_database: Database
) -> None:
    options = "user=scram_user password=sesame channel_binding=require"
    with libpq(tls_server.conninfo(tls_database, options)) as conn:
        tls_server.serve("ecdsa")
        assert start(conn) > 0


def test_a_relay_with_another_certificate_does_not_pass_the_channel_binding(
    tls_server: TlsServer, tls_database: Database
) -> None:
    """The relay serves `good` while the server has another certificate: sslmode=require trusts."""
    tls_server.serve("ecdsa")
    options = "user=scram_user password=sesame"
    with (
        libpq(tls_server.conninfo(tls_database, options)) as conn,
        tls_fronts(tls_server.certificates, is_target_encrypted=True),
        pytest.raises(ConnectionError, match="channel binding"),
    ):
        start(conn)


@pytest.mark.usefixtures("home")
def test_what_only_libpq_can_do_is_left_to_libpq(
    tls_server: TlsServer, tls_database: Database
) -> None:
    certificates = tls_server.certificates
    scram = "user=scram_user password=sesame"
    for options, reason in {
        f"{scram} require_auth=scram-sha-256": "require_auth",
        f"sslcrldir={certificates.folder}": "sslcrldir",
        f"sslmode=verify-full sslsni=0 sslrootcert={certificates.path('root.crt')}": "sslsni",
        f"sslcertmode=require sslcert={certificates.path('cert_user.crt')} "
        f"sslkey={certificates.path('cert_user.key')}": "sslcertmode",
    }.items():
        with (
            libpq(tls_server.conninfo(tls_database, options)) as conn,
            pytest.raises(LibpqRequired, match=reason),
        ):
            start(conn)


def test_a_password_that_changed_in_between_is_refused(
    tls_server: TlsServer, tls_database: Database
) -> None:
    with libpq(tls_server.conninfo(tls_database, "user=scram_user password=sesame")) as conn:
        tls_database.execute("alter role scram_user password 'other'")
        try:
            with pytest.raises(ConnectionError, match="password authentication failed"):
                start(conn)
        finally:
            tls_database.execute("alter role scram_user password 'sesame'")


def test_another_server_at_the_address_is_refused(
    tls_server: TlsServer, tls_database: Database, server18: EmbeddedServer
) -> None:
    with libpq(tls_server.conninfo(tls_database, "dbname=postgres")) as conn:
        with tls_fronts(tls_server.certificates) as fronts:
            original = TlsFront.__init__

            def redirect(front: TlsFront, target: object, *rest: object) -> None:
                original(front, ("127.0.0.1", server18.port), *rest)  # type: ignore[arg-type]

            TlsFront.__init__ = redirect  # type: ignore[method-assign,assignment]
            try:
                with pytest.raises(LibpqRequired, match="another server"):
                    start(conn)
            finally:
                TlsFront.__init__ = original  # type: ignore[method-assign]
        assert len(fronts) == 1


def test_a_host_that_is_no_name_for_python_is_left_to_libpq(
    tls_server: TlsServer, tls_database: Database
) -> None:
    named = tls_server.conninfo(tls_database).replace("host=localhost", "host=.localhost")
    with libpq(named) as conn, pytest.raises(LibpqRequired, match="malformed"):
        start(conn)


@pytest.mark.parametrize("reply", [b"N", b"E", b"SZ\0\0\0\5I"])
def test_a_second_connection_is_never_in_clear_text(
    tls_server: TlsServer, tls_database: Database, reply: bytes
) -> None:
    """CVE-2021-23222 for bytes in clear text behind the reply."""
    with (
        libpq(tls_server.conninfo(tls_database)) as conn,
        tls_fronts(tls_server.certificates, reply=reply),
        pytest.raises((LibpqRequired, OSError)),
    ):
        start(conn, start_seconds=3)


@needs_libpq(17)
def test_a_direct_start_negotiates_the_protocol(
    certificates: Certificates, server18: EmbeddedServer
) -> None:
    """sslnegotiation=direct, since Postgres 17. The front is the server's TLS."""
    target = ("127.0.0.1", server18.port)
    front = TlsFront(target, certificates)
    try:
        address = f"host=127.0.0.1 port={front.port} dbname=postgres user=postgres"
        options = f"sslmode=verify-full sslrootcert={certificates.path('root.crt')}"
        with libpq(f"{address} {options} sslnegotiation=direct") as conn:
            assert start(conn) > 0
            with (
                tls_fronts(certificates, protocols=("http/1.1",)),
                pytest.raises(OSError, match="protocol"),
            ):
                start(conn)
    finally:
        front.close()


@pytest.mark.parametrize(
    ("host", "sent"),
    [
        ("host=localhost hostaddr=127.0.0.1", "localhost"),
        ("host=localhost hostaddr=127.0.0.1 sslsni=0", None),
        ("host=127.0.0.1", None),
    ],
)
def test_the_name_of_the_host_is_sent_as_by_libpq(
    certificates: Certificates, server18: EmbeddedServer, host: str, sent: str | None
) -> None:
    """SNI: the name that libpq sends, and none for an address. The front is the server's TLS."""
    front = TlsFront(("127.0.0.1", server18.port), certificates)
    try:
        options = f"sslmode=verify-ca sslrootcert={certificates.path('root.crt')}"
        with libpq(f"{host} port={front.port} dbname=postgres user=postgres {options}") as conn:
            assert front.names == [sent], "libpq"
            assert start(conn) > 0
        assert front.names == [sent, sent]
    finally:
        front.close()


def test_an_update_of_the_keys_continues_the_session(certificates: Certificates) -> None:
    """TLS 1.3 KeyUpdate, requested by the server between two records."""
    port = free_port()
    server = subprocess.Popen(
        [
            *("openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-tls1_3"),
            *("-cert", certificates.path("good.crt"), "-key", certificates.path("good.key")),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        source = wait_until(lambda: _connected(port), "openssl to listen")
        options = {"sslmode": "verify-full", "sslrootcert": certificates.path("root.crt")}
        channel = TlsChannel(source, TlsSettings.of(options, "localhost"))
        channel.shake_hands(lambda: None)
        server.stdin.write(b"before\n")
        server.stdin.flush()
        received = _read(channel, 7)
        # The program takes a command only at the start of what it reads: wait for the update.
        server.stdin.write(b"K\n")
        server.stdin.flush()
        assert channel.receive() > 0
        assert channel.read_into(memoryview(bytearray(10))) == 0
        channel.send(b"one\n")
        server.stdin.write(b"after\n")
        server.stdin.flush()
        received += _read(channel, 6)
        channel.send(b"two\n")
        shown = b""
        while b"two\n" not in shown:
            shown += server.stdout.readline()
        channel.close()
    finally:
        server.kill()
        server.communicate()
    assert received == b"before\nafter\n"
    assert b"one\n" in shown


def _connected(port: int) -> socket.socket | None:
    with contextlib.suppress(ConnectionRefusedError):
        return socket.create_connection(("127.0.0.1", port), 10)
    return None


def _read(channel: TlsChannel, size: int) -> bytes:
    place, filled = memoryview(bytearray(size)), 0
    while filled < size:
        if not channel.has_rest:
            assert channel.receive() > 0
        filled += channel.read_into(place[filled:])
    return bytes(place)
