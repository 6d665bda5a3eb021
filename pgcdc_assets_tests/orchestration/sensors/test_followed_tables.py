"""The lag sensor stores the tables of a publication that a capture follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg2 import sql

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.table_list import refresh_table_list
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.table_list import TableList
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture
from pgcdc_assets.table_name import TableName
from pgcdc_assets.table_selection import TableSelection
from pgcdc_assets_tests.orchestration.conftest import NAME
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres

CAPTURE = CdcCapture(NAME, "pub", (), selection=TableSelection(exclude=("*.tmp_*",)))


def refresh(database: Database, lake: Lake, capture: CdcCapture = CAPTURE) -> TableList:
    with query_connection(database.settings(), "test") as conn:
        return refresh_table_list(conn, RawZone(lake, NAME), capture)


def states(listed: TableList) -> dict[str, str]:
    return {str(table.name): table.state.value for table in listed.tables}


@contextmanager
def limited_role(database: Database) -> Iterator[ConnectionSettings]:
    """Create a role without rights on tables."""
    role = f"r_{database.name}"
    database.execute(f"create role {role} login replication")
    try:
        yield ConnectionSettings(f"{database.conninfo} user={role}", name="test")
    finally:
        database.execute(f"drop owned by {role}; drop role {role}")


def test_the_list_has_what_the_publication_can_send(database: Database, lake: Lake) -> None:
    odd = 'A "b"/c.d %'
    for statement in (
        "create table good (id int primary key)",
        "create table tmp_1 (id int primary key)",
        "create table no_identity (id int)",
        'create table collides (id int primary key, "V" int, v int)',
        "create unlogged table unlogged (id int primary key)",
        "create view a_view as select 1 as id",
        "create table root (id int primary key) partition by range (id)",
        "create table leaf partition of root for values from (0) to (10)",
        "create publication pub for all tables with (publish_via_partition_root = true)",
    ):
        database.execute(statement)
    database.execute(
        sql.SQL("create table {} (id int primary key)").format(sql.Identifier("public", odd))
    )
    listed = refresh(database, lake)
    assert states(listed) == {
        "public.good": "followed",
        "public.root": "followed",
        str(TableName("public", odd)): "followed",
        "public.no_identity": "refused",
        "public.collides": "refused",
    }
    reasons = {str(table.name): table.reason for table in listed.tables}
    assert "replica identity" in reasons["public.no_identity"]
    assert "Delta cannot distinguish" in reasons["public.collides"]
    # Without a change, nothing is stored.
    before = RawZone(lake, NAME).table_list.read().loaded
    assert refresh(database, lake) == listed
    after = RawZone(lake, NAME).table_list.read().loaded
    assert before is not None
    assert after is not None
    assert before.version() == after.version()
    database.execute("alter publication pub set (publish_via_partition_root = false)")
    found = states(refresh(database, lake))
    assert "public.leaf" in found
    assert "public.root" not in found
    database.execute("drop publication pub")
    with pytest.raises(ConfigurationError, match="Publication pub does not exist"):
        refresh(database, lake)
    assert states(RawZone(lake, NAME).table_list.read()) == found


def test_a_table_is_refused_until_its_role_may_read_it(database: Database, lake: Lake) -> None:
    database.execute("create schema closed; create table closed.a (id int primary key)")
    database.execute("create table rls (id int primary key)")
    database.execute("alter table rls enable row level security")
    database.execute("create publication pub for all tables")
    with limited_role(database) as settings:
        role = f"r_{database.name}"
        zone = RawZone(lake, NAME)
        database.execute(f"grant select on closed.a, rls to {role}")
        with query_connection(settings, "test") as conn:
            listed = refresh_table_list(conn, zone, CAPTURE)
            assert states(listed) == {"closed.a": "refused", "public.rls": "refused"}
            assert "no USAGE on schema closed" in listed.tables[0].reason
            assert "row-level security" in listed.tables[1].reason
            database.execute(f"grant usage on schema closed to {role}")
            assert states(refresh_table_list(conn, zone, CAPTURE))["closed.a"] == "followed"
            database.execute(f"alter role {role} bypassrls")
            assert states(refresh_table_list(conn, zone, CAPTURE))["public.rls"] == "followed"
