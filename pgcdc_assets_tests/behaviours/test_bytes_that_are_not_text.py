"""A database of encoding SQL_ASCII: any byte lands, by copy and by stream, and nothing stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from psycopg2 import sql

from pgcdc_assets.capture.snapshot import copy_tables
from pgcdc_assets.protocol.utf8 import bytes_as_text
from pgcdc_assets_tests.fixtures.capturing import Capturing
from pgcdc_assets_tests.fixtures.database import Database, drop_database

pytestmark = pytest.mark.postgres


@pytest.fixture
def ascii_capturing(capturing: Capturing) -> Iterator[Capturing]:
    """A capture of a database of encoding SQL_ASCII."""
    database = Database(capturing.database.server, f"{capturing.database.name}_a")
    capturing.database.execute(
        sql.SQL(
            "create database {} encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'"
        ).format(sql.Identifier(database.name))
    )
    try:
        yield replace(
            capturing, database=database, slot=f"s_{database.name}", conninfo=database.conninfo
        )
    finally:
        drop_database(database)


def test_a_bad_byte_lands_as_hex_and_the_stream_goes_on(ascii_capturing: Capturing) -> None:
    capturing = ascii_capturing.begin(
        "create table t (id text primary key, v text)", "alter table t replica identity full"
    )
    database = capturing.database
    latin = "convert_from('\\xe9'::bytea, 'SQL_ASCII')"
    database.execute(f"insert into t values ('1', {latin}), ({latin}, '\\xe9')")
    database.execute("update t set v = 'ok' where id = '1'")
    report = capturing.capture()
    bad = bytes_as_text(b"\xe9")
    assert capturing.texts("t") == [["1", bad], [bad, "\\xe9"], ["1", "ok"]]
    assert capturing.rows()[2]["old"] == ["1", bad]
    assert report.warnings == {"public.t: values that are not UTF-8, landed as hex": 3}

    (copied,) = copy_tables(
        capturing.settings, capturing.zone, capturing.slot, capturing.publication
    )
    assert copied.rescued_count == 1
