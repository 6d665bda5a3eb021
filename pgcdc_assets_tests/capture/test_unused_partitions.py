"""Partitions that never had a row: their attachment and detachment move no row."""

from __future__ import annotations

import psycopg2.errors
import pytest

from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.postgres.catalog.publication import read_members
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

_LEAF = "create table leaf (a int, id int primary key)"
_ATTACH = "alter table root attach partition leaf for values from (10) to (20)"
_DETACH = "alter table root detach partition leaf"
_MEMBERS = """
select coalesce(array_agg(format('%I.%I', schemaname, tablename)::regclass::oid::bigint), '{}')
  from pg_publication_tables where pubname = 'leaves'
"""

# Transactions before the leaf is attached, and between its attachment and its detachment. Then the
# changes that a poll finds after each of the two.
_HISTORIES: dict[str, tuple[list[str], list[str], str, str]] = {
    "never used": ([], [], "partition_attached", "partition_detached"),
    "created and attached in one transaction": (
        [f"{_DETACH}; drop table leaf; {_LEAF}; {_ATTACH}"],
        [],
        "partition_attached",
        "partition_detached",
    ),
    "used while it is attached": (
        [], ["insert into root values (11)"], "partition_attached", "partition_detached!",
    ),
    "filled before": (
        ["insert into leaf values (1, 11)"], [], "partition_attached!", "partition_detached!",
    ),
    "emptied by VACUUM": (
        ["insert into leaf values (1, 11)", "delete from leaf", "vacuum leaf"],
        [],
        "partition_attached!",
        "partition_detached!",
    ),
    "emptied by TRUNCATE": (
        ["insert into leaf values (1, 11)", "truncate leaf"],
        [],
        "partition_attached!",
        "partition_detached!",
    ),
    "filled by a transaction that was rolled back": (
        ["create function fail() returns int language plpgsql as "
         "$$ begin raise exception 'no'; end $$",
         "do $$ begin insert into leaf values (1, 11); perform fail(); "
         "exception when others then null; end $$"],
        [],
        "partition_attached!",
        "partition_detached!",
    ),
}  # fmt: skip


@pytest.fixture
def rooted(capturing: Capturing) -> Capturing:
    """Return a capture of a partitioned table whose catalog was polled."""
    capturing.begin("create table root (id int primary key, a int) partition by range (id)", _LEAF)
    capturing.database.execute(
        "drop publication pub;"
        "create publication pub for table root with (publish_via_partition_root = true)"
    )
    assert poll(capturing) == []
    return capturing


@pytest.mark.sampled
def test_a_partition_that_never_had_a_row_needs_no_snapshot(rooted: Capturing) -> None:
    """E3, E5: `pg_partman` creates a table without rows and attaches it, ahead of time."""
    execute = rooted.database.execute
    for name, (before, between, attached, detached) in _HISTORIES.items():
        execute("drop table leaf")
        execute(_LEAF)
        if name.startswith("created"):
            execute(_ATTACH)
            assert shown(poll(rooted)) == ["root partition_attached"]
            execute(*before)
            assert shown(poll(rooted)) == ["root partition_attached", "root partition_detached!"]
        else:
            for statement in before:
                execute(statement)
            execute(_ATTACH)
            assert shown(poll(rooted)) == [f"root {attached}"], name
        for statement in between:
            execute(statement)
        execute(_DETACH)
        assert shown(poll(rooted)) == [f"root {detached}"], name
        assert poll(rooted) == [], name


def test_the_partitions_below_an_attached_partition_count(rooted: Capturing) -> None:
    """E5."""
    execute = rooted.database.execute
    execute(
        "create table mid (id int primary key, a int) partition by range (id);"
        "create table low (id int primary key, a int);"
        "create table high (id int primary key, a int);"
        "alter table mid attach partition low for values from (30) to (35);"
        "alter table mid attach partition high for values from (35) to (40)"
    )
    attach = "alter table root attach partition mid for values from (30) to (40)"
    execute(attach)
    assert shown(poll(rooted)) == ["root partition_attached"]
    execute("alter table root detach partition mid")
    assert shown(poll(rooted)) == ["root partition_detached"]
    execute("insert into mid values (36)")
    execute(attach)
    assert shown(poll(rooted)) == ["root partition_attached!"]


def test_a_poll_does_not_wait_for_the_lock_of_an_attached_partition(rooted: Capturing) -> None:
    """E5: whether the partition has rows is not known then, so it needs a snapshot."""
    rooted.database.execute(_ATTACH)
    with rooted.database.connect(autocommit=False) as conn, conn.cursor() as cursor:
        cursor.execute("lock table leaf in access exclusive mode")
        with query_connection(rooted.settings, "poll", statement_timeout_ms=3000) as other:
            found = poll_catalog(other, rooted.zone, [], rooted.publication)
    assert shown(found) == ["root partition_attached!"]


def test_a_partition_whose_detachment_is_pending_is_detached(rooted: Capturing) -> None:
    """E3: its rows are hidden after the first of the two transactions of CONCURRENTLY."""
    execute = rooted.database.execute
    execute(_ATTACH)
    execute("insert into root values (11)")
    assert shown(poll(rooted)) == ["root partition_attached!"]
    with rooted.database.connect(autocommit=False) as reader, reader.cursor() as cursor:
        cursor.execute("select from root")
        with rooted.database.connect() as conn, conn.cursor() as other:
            other.execute("set statement_timeout = 500")
            with pytest.raises(psycopg2.errors.QueryCanceled):
                other.execute(f"{_DETACH} concurrently")
    assert rooted.database.query("select from root") == []
    assert shown(poll(rooted)) == ["root partition_detached!"]
    # Neither does the server send its changes under its own name.
    execute("create publication leaves for table root")
    with query_connection(rooted.settings, "test") as conn:
        members = [member.relation_id for member in read_members(conn, "leaves")]
    assert members == rooted.database.value(_MEMBERS)
    execute(f"{_DETACH} finalize")
    assert poll(rooted) == []
