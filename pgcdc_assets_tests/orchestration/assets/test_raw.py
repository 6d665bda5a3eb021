"""The metadata of runs that land changes and snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest
from psycopg2 import sql

from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.database import Database, drop_database

pytestmark = pytest.mark.postgres


@pytest.fixture
def ascii_location(orchestrated: Orchestrated) -> Iterator[Orchestrated]:
    """Capture the same tables in a database with encoding SQL_ASCII."""
    database = Database(orchestrated.database.server, f"{orchestrated.database.name}_a")
    orchestrated.database.execute(
        sql.SQL(
            "create database {} encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'"
        ).format(sql.Identifier(database.name))
    )
    try:
        database.execute("create table a (id int primary key, v text)")
        database.execute("create table b (id int primary key, n numeric(10, 2))")
        database.execute("create publication pub for table a, b")
        capture = replace(orchestrated.capture, slot=f"s_{database.name}")
        yield Orchestrated(database, orchestrated.lake, orchestrated.instance, capture)
    finally:
        drop_database(database)


def test_values_that_are_not_utf8_are_counted_by_table_and_the_run_succeeds(
    ascii_location: Orchestrated,
) -> None:
    bad = "convert_from('\\xe9'::bytea, 'SQL_ASCII')"
    ascii_location.commit(f"insert into a values (1, {bad}), (2, 'ok')")
    ascii_location.copy()
    ascii_location.commit(f"insert into a values (3, {bad}), (4, {bad}); insert into b values (1)")
    ascii_location.land()

    (window,) = ascii_location.windows()
    landed = _metadata(ascii_location, "raw", window)
    assert {r.data["warning"]: r.data["count"] for r in landed["warnings"].records} == {
        "public.a: values that are not UTF-8, landed as hex": "2"
    }
    copied = {
        table: _metadata(ascii_location, "snapshot", f"public.{table}")["values_not_utf8"].value
        for table in "ab"
    }
    assert copied == {"a": 1, "b": 0}


def _metadata(location: Orchestrated, asset: str, partition: str) -> dict[str, Any]:
    records = location.instance.fetch_materializations(
        dg.AssetRecordsFilter(dg.AssetKey([NAME, asset]), asset_partitions=[partition]), limit=1
    ).records
    assert records[0].asset_materialization is not None
    return dict(records[0].asset_materialization.metadata)
