"""Declared tables that were renamed, moved, dropped or unpublished are named with their
change."""

from __future__ import annotations

import pytest

from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.moved_tables import find_moved_tables
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres


def test_each_moved_table_is_found(database: Database) -> None:
    tables = "stays renamed moved dropped made_again swapped unpublished".split()
    for table in tables:
        database.execute(f"create table {table} (id int primary key)")
    database.execute(f"create publication pub for table {', '.join(tables)}")
    known = {
        TableName("public", table): database.value("select %s::regclass::oid::bigint", (table,))
        for table in tables
    }
    with query_connection(database.settings(), "test") as conn:
        assert find_moved_tables(conn, "pub", {}) == []
        assert find_moved_tables(conn, "pub", known) == []
        database.execute("create schema other")
        database.execute("alter table renamed rename to called")
        database.execute("alter table moved set schema other")
        database.execute("drop table dropped, made_again")
        database.execute("create table made_again (id int primary key)")
        database.execute("alter table swapped rename to swapped_old")
        database.execute("create table swapped (id int primary key)")
        database.execute("alter publication pub drop table unpublished")
        database.execute("alter publication pub add table made_again, swapped")
        found = {e.relation: e.reason for e in find_moved_tables(conn, "pub", known)}
    assert found == {
        "public.renamed": "is named public.called now",
        "public.moved": "is named other.moved now",
        "public.dropped": "was dropped",
        "public.made_again": "was dropped and created again",
        "public.swapped": "is named public.swapped_old now, and another table has its name",
        "public.unpublished": "is not in publication pub any more",
    }
