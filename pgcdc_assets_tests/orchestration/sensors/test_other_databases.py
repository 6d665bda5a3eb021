"""A lag sensor whose settings name another database than that of the lake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.errors import RawZoneError
from pgcdc_assets_tests.orchestration.conftest import Orchestrated
from pgcdc_assets_tests.orchestration.sensors.test_lag import root_cause
from pgcdc_assets_tests.support.database import Database, create_database, drop_database

pytestmark = pytest.mark.postgres


@pytest.fixture
def other(orchestrated: Orchestrated) -> Iterator[Database]:
    """Return a database with the same tables, as for tests of an application."""
    database = create_database(orchestrated.database.server)
    try:
        database.execute("create table a (id int primary key, v text)")
        database.execute("create table b (id int primary key, n numeric(10, 2))")
        database.execute("create publication pub for table a, b")
        yield database
    finally:
        drop_database(database)


def test_the_catalog_of_another_database_changes_nothing_in_the_lake(
    orchestrated: Orchestrated, other: Database
) -> None:
    """Each table would count as replaced, and would need a snapshot at an LSN of that server."""
    orchestrated.copy()
    zone, names = orchestrated.zone, orchestrated.capture.table_names
    seen = zone.definitions.newest(1)
    capture = replace(orchestrated.capture, slot=f"s_{other.name}", catalog_poll_seconds=0)
    elsewhere = replace(orchestrated, database=other, capture=capture)
    with pytest.raises(Exception) as caught:
        elsewhere.tick("lag")
    error = root_cause(caught.value)
    assert isinstance(error, RawZoneError)
    assert f"of database {orchestrated.database.name} " in str(error)
    assert f"of database {other.name} " in str(error)
    with other.connect() as conn, pytest.raises(RawZoneError):
        poll_catalog(conn, zone, names, "pub")
    assert zone.schema_events.read() == []
    assert zone.definitions.newest(1).digest == seen.digest
    assert orchestrated.tick("lag").run_requests, "a window"
