"""Dropped and unpublished tables are errors, and renamed tables are followed (F8)."""

from __future__ import annotations

import pytest

from pgcdc_assets.postgres.catalog.moved_tables import read_source_places
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres


def test_the_place_of_each_table_is_found(database: Database) -> None:
    tables = "stays renamed moved dropped made_again swapped unpublished moved_out replaced".split()
    for table in tables:
        database.execute(f"create table {table} (id int primary key)")
    database.execute(f"create publication pub for table {', '.join(tables)}")
    known = {
        TableName("public", table): database.value("select %s::regclass::oid::bigint", (table,))
        for table in tables
    }
    with query_connection(database.settings(), "test") as conn:
        assert read_source_places(conn, "pub", {}) == {}
        places = read_source_places(conn, "pub", known)
        assert {name: place.name for name, place in places.items()} == {n: n for n in known}
        assert not any(place.error or place.is_renamed for place in places.values())
        database.execute("create schema other")
        database.execute("alter table renamed rename to called")
        database.execute("alter table moved set schema other")
        database.execute("drop table dropped, made_again")
        database.execute("create table made_again (id int primary key)")
        database.execute("alter table swapped rename to swapped_old")
        database.execute("create table swapped (id int primary key)")
        database.execute("alter table moved_out set schema other")
        database.execute("alter table replaced rename to replaced_old")
        database.execute("create table replaced (id int primary key)")
        database.execute("alter publication pub drop table unpublished, other.moved_out")
        database.execute("alter publication pub add table made_again, swapped")
        places = read_source_places(conn, "pub", known)
    followed = {p.declared.table: str(p.name) for p in places.values() if p.is_renamed}
    assert followed == {"renamed": "public.called", "moved": "other.moved"}
    replaced = [place.declared.table for place in places.values() if place.is_replaced]
    assert sorted(replaced) == ["made_again", "swapped"]
    errors = [place.error for place in places.values() if place.error is not None]
    assert {error.relation: error.reason for error in errors} == {
        "public.dropped": "was dropped",
        "public.made_again": "was dropped and created again",
        "public.swapped": "is named public.swapped_old now, and another table has its name",
        "public.unpublished": "is not in publication pub any more",
        "public.moved_out": "is named other.moved_out now, and is not in publication pub any more",
        "public.replaced": "is named public.replaced_old now, and another table, which publication "
        "pub does not send, has its name",
    }
