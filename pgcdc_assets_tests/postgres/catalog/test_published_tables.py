"""The published tables, read without the view of the server, which waits for locks."""

from __future__ import annotations

import pytest

from pgcdc_assets.postgres.catalog.publication import read_members, read_row_filters
from pgcdc_assets.postgres.connection import Connection, query_connection
from pgcdc_assets_tests.support.database import Database

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

_TABLES = """
create schema a; create schema b;
create table a.plain (id int primary key, x text, g int generated always as (1) stored);
create table a.dropped (id int primary key, x text, y text); alter table a.dropped drop column x;
create table a.empty ();
create unlogged table a.fast (id int);
create table a.parent (id int); create table a.child (y int) inherits (a.parent);
create table a.root (id int primary key, x text) partition by range (id);
create table b.leaf partition of a.root for values from (0) to (10);
create table a.middle partition of a.root for values from (10) to (20) partition by range (id);
create table b.deep partition of a.middle for values from (10) to (15);
create table b.other (id int primary key, "Y" text);
create view b.shown as select 1 as id;
create publication everything for all tables;
create publication roots for all tables with (publish_via_partition_root = true);
create publication listed for table a.plain, a.root, a.parent, b.other;
create publication listed_roots for table a.root, b.leaf, b.other
  with (publish_via_partition_root = true);
create publication lower for table a.middle with (publish_via_partition_root = true);
create publication nothing;
"""
_SINCE_15 = """
create publication schema_a for tables in schema a;
create publication schema_roots for tables in schema a with (publish_via_partition_root = true);
create publication schema_leaves for tables in schema b with (publish_via_partition_root = true);
create publication mixed for tables in schema a, table b.other;
create publication columns for table a.plain (id, x), b.other (id, "Y") where ("Y" <> 'no');
create publication filtered_root for table a.root (id) where (id > 5)
  with (publish_via_partition_root = true);
create publication covered for table b.other where (id > 5), tables in schema b;
"""
_SINCE_18 = "create publication generated for all tables with (publish_generated_columns = stored)"


def _by_the_view(
    conn: Connection, publication: str
) -> dict[int, tuple[list[str] | None, str | None]]:
    has_columns = conn.server_version >= 150000
    columns = "t.attnames::text[], t.rowfilter" if has_columns else "null, null"
    with conn.cursor() as cursor:
        cursor.execute(
            f"select c.oid::bigint, {columns} from pg_publication_tables t "
            "join pg_namespace n on n.nspname = t.schemaname "
            "join pg_class c on c.relnamespace = n.oid and c.relname = t.tablename "
            "where t.pubname = %s order by t.schemaname, t.tablename",
            (publication,),
        )
        return {oid: (names, row_filter) for oid, names, row_filter in cursor}


def test_the_published_tables_are_those_of_the_view_of_the_server(database: Database) -> None:
    version = database.server.version
    database.execute(_TABLES)
    if version >= 15:
        database.execute(_SINCE_15)
    if version >= 18:
        database.execute(_SINCE_18)
    names = [name for (name,) in database.query("select pubname::text from pg_publication")]
    assert len(names) >= 6
    with query_connection(database.settings(), "test") as conn:
        for name in names:
            expected = _by_the_view(conn, name)
            members = read_members(conn, name)
            assert [member.relation_id for member in members] == list(expected), name
            filters = read_row_filters(conn, name)
            for member in members:
                columns, row_filter = expected[member.relation_id]
                assert filters.get(member.relation_id) == row_filter, name
                if columns is None:
                    assert not member.columns, name
                else:
                    # Before 18 the view may list generated columns, which are never sent.
                    ignored = set() if version >= 18 else {"g"}
                    assert (member.columns or set()) - ignored == set(columns) - ignored, name
