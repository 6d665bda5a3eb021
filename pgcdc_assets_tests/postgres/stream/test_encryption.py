"""An encrypted stream has the rows of an unencrypted stream."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from psycopg import pq

from pgcdc_assets.capture.window import CaptureLimits
from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.errors import ConfigurationError, ConnectionLost
from pgcdc_assets.postgres.catalog.relations import published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy import transport as copy_transport
from pgcdc_assets.postgres.copy.reader import copy_published
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets.postgres.stream import start as stream_module
from pgcdc_assets.postgres.stream import tls_transport
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.tls_start import TlsSession, start_session
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.tls_server import VERSION, TlsServer, needs_libpq, refuse
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(
        binaries(VERSION) is None, reason="the embedded servers are built without SSL"
    ),
]

_STREAMS = "select count(*) from pg_stat_replication where state = 'streaming'"


@pytest.fixture
def encrypted(tls_server: TlsServer, tls_database: Database, tmp_path: Path) -> Capturing:
    """Return a capture from a server with TLS, with every check of the server's certificate."""
    zone = RawZone(Lake(str(tmp_path / "lake")), "test")
    root = tls_server.certificates.path("root.crt")
    conninfo = tls_server.conninfo(tls_database, f"sslmode=verify-full sslrootcert={root}")
    return Capturing(tls_database, zone, f"s_{tls_database.name}", conninfo)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ("ssl_max_protocol_version=TLSv1.3", "LibpqWire"),
        ("ssl_max_protocol_version=TLSv1.2", "LibpqWire"),
        pytest.param("require_auth=none", "TlsWire", marks=needs_libpq(16)),
    ],
)
def test_an_encrypted_stream_lands_the_rows_of_the_source(
    encrypted: Capturing, monkeypatch: pytest.MonkeyPatch, options: str, unused: str
) -> None:
    """B18. A batch is smaller than the largest row, which takes many records."""
    monkeypatch.setattr(stream_module, "SocketWire", refuse)
    monkeypatch.setattr(tls_transport, unused, refuse)
    database = encrypted.database
    capturing = encrypted.through(f"{encrypted.conninfo} {options}")
    capturing.begin("create table t (id int primary key, v text)")
    for low in range(0, 5000, 1000):
        database.execute(
            "insert into t select i, repeat(md5(i::text), 1 + i % 40) "
            f"from generate_series({low}, {low + 999}) i"
        )
    database.execute("update t set v = repeat(md5(id::text), 2000 * id) where id < 10")
    database.execute("delete from t where id >= 4990")
    limits = CaptureLimits(stream=StreamSettings(wire=WireSettings(batch_bytes=100_000)))
    report = capturing.capture(limits=limits)
    assert report.counts["public.t"] == {"D": 10, "I": 5000, "U": 10}
    rows = capturing.rows()
    inserted = [row["new"] for row in rows if row["op"] == "I"]
    expected = database.query(
        "select array[i::text, repeat(md5(i::text), 1 + i % 40)] "
        "from generate_series(0, 4999) i order by i"
    )
    assert inserted == [list(row[0]) for row in expected]
    updated = [row["new"] for row in rows if row["op"] == "U"]
    large = database.query("select array[id::text, v] from t where id < 10 order by id")
    assert sorted(updated) == [list(row[0]) for row in large]
    assert capturing.confirmed() == report.window.end


def test_a_connection_cut_inside_a_record_lands_nothing_twice(encrypted: Capturing) -> None:
    """B1: 40 KB/s cut records of 8 KB in the middle."""
    database = encrypted.database
    encrypted.begin("create table t (id int, v text)")
    window = encrypted.window(1 << 30)
    proxy = TcpProxy("127.0.0.1", database.server.port)
    try:
        through = encrypted.through(proxy.conninfo(encrypted.conninfo))
        with through.capture_aside(window) as outcome:
            wait_until(lambda: database.value(_STREAMS), "the capture to stream")
            proxy.throttle(40_000)
            before = proxy.bytes_from_server
            database.execute(
                "insert into t select 1, string_agg(md5(i::text), '') "
                "from generate_series(1, 100000) i"
            )
            wait_until(lambda: proxy.bytes_from_server > before + 30_000, "bytes of the row")
            proxy.cut()
    finally:
        proxy.close()
    assert isinstance(outcome.error, ConnectionLost)
    assert encrypted.rows() == []
    assert encrypted.confirmed() == window.start
    encrypted.capture()
    assert encrypted.texts("t") == [
        list(row[0]) for row in database.query("select array[id::text, v] from t")
    ]


def test_a_second_connection_that_fails_leaves_the_stream_to_libpq(
    tls_server: TlsServer,
    encrypted: Capturing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An attacker answers the second connection."""
    encrypted.begin("create table t (id int)")
    encrypted.database.execute("insert into t values (1)")

    def start_under_attack(conn: pq.abc.PGconn, settings: WireSettings) -> TlsSession:
        tls_server.serve("unknown")
        try:
            return start_session(conn, settings)
        finally:
            tls_server.serve("good")

    monkeypatch.setattr(tls_transport, "start_session", start_under_attack)
    monkeypatch.setattr(tls_transport, "TlsWire", refuse)
    with caplog.at_level("INFO"):
        encrypted.capture()
    assert "read through libpq" in caplog.text
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert encrypted.texts("t") == [["1"]]


def test_no_log_line_has_the_password(
    encrypted: Capturing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B18. A refused password, a second connection that fails, and two captures that succeed."""
    database = encrypted.database
    encrypted.begin("create table t (id int)")
    wrong, right = (
        encrypted.through(f"{encrypted.conninfo} user=scram_user password={password}")
        for password in ("wr0ng-s3cret", "sesame")
    )

    def start_with_a_changed_password(conn: pq.abc.PGconn, settings: WireSettings) -> TlsSession:
        database.execute("alter role scram_user password 'other'")
        try:
            return start_session(conn, settings)
        finally:
            database.execute("alter role scram_user password 'sesame'")

    with caplog.at_level(logging.DEBUG):
        with pytest.raises(ConfigurationError, match="password authentication failed") as caught:
            wrong.capture()
        for replaced in (start_with_a_changed_password, start_session):
            monkeypatch.setattr(tls_transport, "start_session", replaced)
            database.execute("insert into t values (1)")
            right.capture()
    assert encrypted.texts("t") == [["1"], ["1"]]
    assert "read through libpq, which costs more CPU: password authentication" in caplog.text
    logged = "".join(f"{record.__dict__} {record.getMessage()}" for record in caplog.records)
    for text in (caplog.text, logged, f"{caught.value!r} {caught.value}"):
        assert "s3cret" not in text
        assert "sesame" not in text


def test_a_copy_over_tls_has_the_rows_of_the_source(
    encrypted: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_transport, "_read_socket", refuse)
    database = encrypted.database
    database.execute(
        "create table t (id int primary key, v text); create publication pub for table t;"
        "insert into t select i, repeat(md5(i::text), i % 40) from generate_series(1, 5000) i"
    )
    settings = encrypted.settings
    with query_connection(settings, "test") as conn:
        [table] = published_tables(conn, "pub")
    with create_slot(settings, "copied", temporary=True) as snapshot:
        batches = list(copy_published(settings, table, snapshot.snapshot_name, chunk_bytes=50_000))
    assert len(batches) > 1
    rows = [row for batch in batches for row in batch.column("new").to_pylist()]
    expected = database.query("select array[id::text, v] from t order by id")
    assert sorted(rows, key=lambda row: int(row[0])) == [list(row[0]) for row in expected]


def test_each_refusal_of_a_tls_server_has_its_reason_and_remedy(
    tls_server: TlsServer, tls_database: Database, tmp_path: Path
) -> None:
    """The errors have the first line of libpq's message, and the remedy."""
    base = f"host=127.0.0.1 port={tls_server.server.port} dbname={tls_database.name} user=reader"

    def refusal(options: str) -> str:
        with (
            pytest.raises(ConfigurationError) as caught,
            query_connection(ConnectionSettings(f"{base} {options}"), "test"),
        ):
            pass
        return str(caught.value)

    plain = refusal("password=sesame sslmode=disable")
    assert "no encryption. This connection is not encrypted: set sslmode=require" in plain
    wrong = refusal("password=wrong")
    assert "password authentication failed" in wrong
    assert "PGPASSWORD" in wrong
    missing = refusal(f"password=sesame sslmode=verify-full sslrootcert={tmp_path}/no.crt")
    assert f'root certificate file "{tmp_path}/no.crt" does not exist. Name the file' in missing
    tls_server.serve("wrong_name")
    root = tls_server.certificates.path("root.crt")
    named = base.replace("127.0.0.1", "localhost")
    base = f"{named} hostaddr=127.0.0.1"
    other = refusal(f"password=sesame sslmode=verify-full sslrootcert={root}")
    assert 'server certificate for "elsewhere.example" does not match host name "local' in other
