"""Errors of a server with translated messages get the same remedies.

The server needs a German locale, which the test compiles, and translations, which only some
packages of Postgres have.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConfigurationError, SlotLost
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.relations import published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.reader import copy_published
from pgcdc_assets.postgres.slots.creation import create_slot
from pgcdc_assets.postgres.stream.request import StreamRequest, StreamSettings
from pgcdc_assets.postgres.stream.start import start_stream
from pgcdc_assets_tests.support.database import Database, create_database

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

_LOCALE = "de_DE.UTF-8"


@pytest.fixture
def translated(own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """Return a database of a server that writes German messages."""
    if shutil.which("localedef") is None:
        pytest.skip("no localedef")
    # The server's user cannot read pytest's temporary folder.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(folder / _LOCALE)]
        if subprocess.run(command, capture_output=True, check=False, timeout=300).returncode:
            pytest.skip("no definition of the locale de_DE")
        monkeypatch.setenv("LOCPATH", name)
        own_server.start()
        database = create_database(own_server, "source")
        database.execute(f"alter system set lc_messages = '{_LOCALE}'")
        database.query("select pg_reload_conf()")
        try:
            database.query("select 1 / 0")
        except psycopg2.errors.DivisionByZero as error:
            if "division by zero" in str(error):
                pytest.skip("this package of Postgres has no translations")
        yield database


def test_a_lost_slot_and_a_policy_are_known_on_a_translated_server(translated: Database) -> None:
    translated.execute(
        """
        create table t (id int primary key);
        create publication pub for table t;
        alter table t enable row level security;
        create role reader login replication;
        grant select on t to reader
        """
    )
    settings = translated.settings()
    limited = ConnectionSettings(settings.conninfo.replace("user=postgres", "user=reader"), "test")
    with create_slot(settings, "copied", temporary=True) as snapshot:
        with query_connection(settings, "test") as conn:
            [table] = published_tables(conn, "pub")
        with pytest.raises(ConfigurationError, match=r'alter role "reader" bypassrls'):
            list(copy_published(limited, table, snapshot.snapshot_name))

    translated.query("select pg_create_logical_replication_slot('lost', 'pgoutput')")
    for statement in (
        "alter system set max_slot_wal_keep_size = '1MB'",
        "select pg_reload_conf()",
        *[
            "insert into t select coalesce(max(id), 0) + 1 from t",
            "select pg_switch_wal()",
            "checkpoint",
        ]
        * 4,
    ):
        translated.execute(statement)
    request = StreamRequest(settings, "lost", "pub", Lsn(0), StreamSettings())
    with pytest.raises(SlotLost, match="pgcdc renew"):
        start_stream(request, lambda _: None)
