"""An encrypted stream has the rows of an unencrypted stream."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.source import make_certificate
from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres import copy_transport
from pgcdc_assets.postgres.catalog import published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy import copy_published
from pgcdc_assets.postgres.slots import create_slot
from pgcdc_assets.postgres.stream import connection as stream_module
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import create_database

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(binaries(15) is None, reason="the embedded servers are built without SSL"),
]


@pytest.fixture
def encrypted() -> Iterator[EmbeddedServer]:
    """Start a server with TLS."""
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-test-tls-")) / "data"
    server = EmbeddedServer(folder, 15, UNSAFE_BUT_FAST).start()
    try:
        server.stop()
        make_certificate(folder)
        server.settings["ssl"] = "on"
        yield server.start()
    finally:
        server.remove()
        server.data_dir.parent.rmdir()


def test_an_encrypted_stream_lands_the_rows_of_the_source(
    encrypted: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B18: an encrypted connection is read through libpq and not from the socket."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the bare socket of an encrypted connection was read")

    monkeypatch.setattr(stream_module, "SocketWire", refuse)
    database = create_database(encrypted, "source")
    zone = RawZone(Lake(str(tmp_path / "lake")), "test")
    capturing = Capturing(database, zone, "s", f"{database.conninfo} sslmode=require")
    capturing.begin("create table t (id int primary key, v text)")
    for low in range(0, 5000, 1000):
        database.execute(
            "insert into t select i, repeat(md5(i::text), 1 + i % 40) "
            f"from generate_series({low}, {low + 999}) i"
        )
    database.execute("update t set v = 'new' where id < 10")
    database.execute("delete from t where id >= 4990")
    report = capturing.capture()
    assert report.counts["public.t"] == {"D": 10, "I": 5000, "U": 10}
    inserted = [row["new"] for row in capturing.rows() if row["op"] == "I"]
    expected = database.query(
        "select array[i::text, repeat(md5(i::text), 1 + i % 40)] "
        "from generate_series(0, 4999) i order by i"
    )
    assert inserted == [list(row[0]) for row in expected]
    assert capturing.confirmed() == report.window.end


def test_a_copy_over_tls_has_the_rows_of_the_source(
    encrypted: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the bare socket of an encrypted connection was read")

    monkeypatch.setattr(copy_transport, "_read_socket", refuse)
    database = create_database(encrypted, "source")
    database.execute(
        "create table t (id int primary key, v text); create publication pub for table t;"
        "insert into t select i, repeat(md5(i::text), i % 40) from generate_series(1, 5000) i"
    )
    settings = ConnectionSettings(f"{database.conninfo} sslmode=require", "test")
    with query_connection(settings, "test") as conn:
        [table] = published_tables(conn, "pub")
    with create_slot(settings, "copied", temporary=True) as snapshot:
        batches = list(copy_published(settings, table, snapshot.snapshot_name, chunk_bytes=50_000))
    assert len(batches) > 1
    rows = [row for batch in batches for row in batch.column("new").to_pylist()]
    expected = database.query("select array[id::text, v] from t order by id")
    assert sorted(rows, key=lambda row: int(row[0])) == [list(row[0]) for row in expected]


def test_each_refusal_of_a_tls_server_has_its_reason_and_remedy(
    encrypted: EmbeddedServer, tmp_path: Path
) -> None:
    """The errors have the first line of libpq's message, and the remedy."""
    encrypted.stop()
    hba = encrypted.data_dir / "pg_hba.conf"
    rules = hba.read_text()
    hba.write_text(
        f"hostssl all reader 127.0.0.1/32 scram-sha-256\n"
        f"host all reader 127.0.0.1/32 reject\n{rules}"
    )
    encrypted.start()
    database = create_database(encrypted, "source")
    database.execute("create role reader login password 'sesame'")
    base = f"host=127.0.0.1 port={encrypted.port} dbname={database.name} user=reader"

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
    certificate = tmp_path / "server.crt"
    shutil.copy(encrypted.data_dir / "server.crt", certificate)
    named = base.replace("127.0.0.1", "localhost")
    base = f"{named} hostaddr=127.0.0.1"
    other = refusal(f"password=sesame sslmode=verify-full sslrootcert={certificate}")
    assert 'server certificate for "127.0.0.1" does not match host name "localhost"' in other
