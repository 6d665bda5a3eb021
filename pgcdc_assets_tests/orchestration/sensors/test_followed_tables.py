"""The lag sensor stores the tables of a publication that a capture follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import pytest
from psycopg2 import sql

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project.reload import NOT_RELOADED
from pgcdc_assets.orchestration.state import left_tables
from pgcdc_assets.orchestration.table_list import refresh_table_list
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.table_list import ListedState, TableList
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.settings.selection import TableSelection
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated, followed_capture
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


def test_a_list_without_tables_is_stored_once(database: Database, lake: Lake) -> None:
    database.execute("create table a (id int primary key); create publication pub for all tables")
    assert states(refresh(database, lake)) == {"public.a": "followed"}
    database.execute("drop table a")
    versions = []
    for _ in range(3):
        assert states(refresh(database, lake)) == {}
        loaded = RawZone(lake, NAME).table_list.read().loaded
        assert loaded is not None
        versions.append(loaded.version())
    assert versions == [2, 2, 2]
    database.execute("create table b (id int primary key)")
    assert states(refresh(database, lake)) == {"public.b": "followed"}


def test_a_renamed_table_is_followed_before_its_snapshot_in_a_new_epoch(
    database: Database, lake: Lake
) -> None:
    """F8: the snapshots of a new epoch may take hours, and the catalog changes in this time."""
    database.execute("create table a (id int primary key); create publication pub for all tables")
    zone, settings, slot = RawZone(lake, NAME), database.settings(), f"s_{database.name}"
    snapshot_tables(settings, zone, slot, "pub", [TableName("public", "a")])
    assert states(refresh(database, lake)) == {"public.a": "followed"}
    database.execute("alter table a rename to b")
    assert states(refresh(database, lake)) == {"public.a": "followed"}
    database.execute(f"select pg_drop_replication_slot('{slot}')")
    renew_epoch(settings, zone, slot, "pub")
    database.execute("create table c (id int primary key)")
    followed = {"public.a": "followed", "public.c": "followed"}
    assert states(refresh(database, lake)) == followed


@pytest.mark.every_pg(since=15)
def test_the_list_follows_the_tables_of_a_published_schema(database: Database, lake: Lake) -> None:
    database.execute(
        "create schema s; create table s.a (id int primary key);"
        "create table s.tmp_b (id int primary key); create table outside (id int primary key);"
        "create publication pub for tables in schema s"
    )
    assert states(refresh(database, lake)) == {"s.a": "followed"}
    database.execute(
        "create table s.new (id int primary key); alter table outside set schema s;"
        "alter table s.a set schema public"
    )
    assert states(refresh(database, lake)) == {"s.new": "followed", "s.outside": "followed"}


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


@pytest.mark.sampled
@pytest.mark.slow
def test_the_sensor_detects_added_and_removed_tables(
    database: Database, lake: Lake, instance: dg.DagsterInstance
) -> None:
    database.execute("create table a (id int primary key); create table b (id int primary key)")
    database.execute("create publication pub for all tables")
    # After the first window, no window is opened.
    windows = WindowPolicy(max_age_seconds=3600, min_bytes=2**40, max_bytes=2**41)
    capture = followed_capture(database, windows)
    # Definitions without a list have the sensor, which stores the first list.
    first = Orchestrated(database, lake, instance, capture)
    found = first.tick("lag")
    assert found.run_requests == []
    note = f"the loaded definitions lack public.a, public.b: {NOT_RELOADED}"
    assert note in found.skip_message

    second = Orchestrated(database, lake, instance, capture)
    second.copy()
    second.land()
    database.execute("create table c (id int primary key); create table d (id int primary key)")
    assert "lack public.c, public.d" in second.tick("lag").skip_message
    database.execute("alter table b add column n float default random()")
    (request,) = second.tick("lag").run_requests
    assert request.tags["dagster/asset_partition_range_start"] == "public.b"
    database.execute("drop table d; drop table b; alter table a rename to a2")
    # Table d left before its snapshot. Table b was captured, and no further snapshot of b is
    # requested. Table a is followed.
    third = Orchestrated(database, lake, instance, capture)
    (request,) = third.tick("lag").run_requests
    assert request.tags["dagster/asset_partition_range_start"] == "public.c"
    listed = third.zone.table_list.read()
    assert [str(table.name) for table in listed.tables] == ["public.a", "public.b", "public.c"]
    assert [str(table.name) for table in listed.of_state(ListedState.LEFT)] == ["public.b"]

    fourth = Orchestrated(database, lake, instance, capture)
    (request,) = fourth.tick("lag").run_requests
    assert request.tags["dagster/asset_partition_range_start"] == "public.c"
    assert request.tags["dagster/asset_partition_range_end"] == "public.c"
    assert list(left_tables(fourth.zone, fourth.location.captures[NAME].capture)) == [
        TableName("public", "b")
    ]
    check = dg.AssetCheckKey(dg.AssetKey([NAME, "snapshot"]), "replica_identity")
    (identities,) = fourth.evaluate(check)
    assert (identities.passed, identities.metadata["table_count"].value) == (True, 2)
