"""A connection that GSSAPI encrypts is read through libpq, from a server with Kerberos."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.postgres import copy_transport
from pgcdc_assets.postgres.catalog import published_tables
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.copy import copy_published
from pgcdc_assets.postgres.slots import create_slot
from pgcdc_assets.postgres.stream import start
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import create_database
from pgcdc_assets_tests.support.kerberos import PROGRAMS, VERSION, Realm, gssapi_server
from pgcdc_assets_tests.support.tls_server import refuse

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(
        binaries(VERSION) is None or not all(map(shutil.which, PROGRAMS)),
        reason="Debian's postgresql-15, krb5-kdc, krb5-admin-server or krb5-user is missing",
    ),
]


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Capturing]:
    """Return a capture over GSSAPI encryption, with the ticket of `capturer`."""
    # The server's user reads the realm's settings, and cannot read pytest's temporary folder.
    with (
        TemporaryDirectory(prefix="pgcdc-test-realm-") as folder,
        closing(Realm(Path(folder))) as running,
    ):
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        with gssapi_server(running) as server:
            database = create_database(server, "source")
            conninfo = (
                f"host=localhost hostaddr=127.0.0.1 port={server.port} dbname=source "
                "user=capturer gssencmode=require"
            )
            zone = RawZone(Lake(str(tmp_path / "lake")), "test")
            yield Capturing(database, zone, "s", conninfo)


def test_rows_over_gssapi_encryption_are_those_of_the_source(
    encrypted: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream and a copy; the package's own reading of sockets would see encrypted bytes."""
    for module, name in (
        (start, "SocketWire"),
        (start, "start_tls_wire"),
        (copy_transport, "_read_socket"),
    ):
        monkeypatch.setattr(module, name, refuse)
    encrypted.begin("create table t (id int primary key, v text)")
    encrypted.database.execute(
        "insert into t select i, repeat(md5(i::text), i % 40) from generate_series(1, 3000) i"
    )
    encrypted.capture()
    expected = [
        list(row[0])
        for row in encrypted.database.query("select array[id::text, v] from t order by id")
    ]
    assert encrypted.texts("t") == expected
    settings = encrypted.settings
    with query_connection(settings, "test") as conn:
        [table] = published_tables(conn, encrypted.publication)
    with create_slot(settings, "copied", temporary=True) as snapshot:
        copied = [
            row
            for batch in copy_published(settings, table, snapshot.snapshot_name)
            for row in batch.column("new").to_pylist()
        ]
    assert sorted(copied, key=lambda row: int(row[0])) == expected
