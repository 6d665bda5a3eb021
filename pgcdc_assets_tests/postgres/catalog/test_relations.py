"""Relations that are completed from the catalog, compared with pgoutput's announcements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.relation_resolver import (
    CatalogResolver,
    Completion,
    complete_relation,
)
from pgcdc_assets.postgres.catalog.relations import published_relations, published_tables
from pgcdc_assets.postgres.connection import Connection, query_connection
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.postgres.wire import Captured, peek

# This commit LSN is above every catalog entry, so each announcement reads the catalog again.
NEVER = Lsn(2**62)


def _published(database: Database, publication: str = "pub") -> dict[str, Relation]:
    with query_connection(database.settings(), "test") as conn:
        return {r.qualified_name: r for r in published_relations(conn, publication)}


@pytest.fixture
def conn(database: Database) -> Iterator[Connection]:
    with query_connection(database.settings(), "test") as conn:
        yield conn


def _captured(database: Database, *statements: str, publication: str = "pub") -> Captured:
    """Run statements after the creation of a slot, and return the slot's content."""
    slot = f"s_{database.name}"
    with create_slot(database.settings(), slot):
        pass
    for statement in statements:
        database.execute(statement)
    with query_connection(database.settings(), "test") as conn:
        return peek(conn, slot, publication)


@pytest.mark.postgres
@pytest.mark.every_pg
def test_a_column_s_missing_value_is_the_text_of_the_rows_from_before(database: Database) -> None:
    """Also of types whose arrays have another delimiter than a comma, and of partitions."""
    database.execute("create domain area as box; create type pair as (a box, b text)")
    database.execute(
        "create table plain (id int); create table root (id int) partition by range (id);"
        "create table leaf partition of root for values from (0) to (9);"
        "create table other partition of root for values from (9) to (19);"
        "insert into plain values (1); insert into root values (1), (9);"
        "create publication pub for table plain, root with (publish_via_partition_root)"
    )
    defaults = {
        "box": "(3,4),(1,2)",
        "area": "(3,4),(1,2)",
        "box[]": "{(3,4),(1,2);(5,6),(3,4)}",
        "pair": '("(3,4),(1,2)","x y")',
        "text": 'it\\ "is", {so}',
        "varchar": "NULL",
        "text[]": '{a,"b,c",NULL}',
        "polygon": "((0,0),(1,1))",
        "int": "5",
        "bytea": "\\x",
        "char(3)": "",
    }
    added = ", ".join(
        f"add c{n} {kind} default $${text}$$" for n, (kind, text) in enumerate(defaults.items())
    )
    for table in ("plain", "root"):
        database.execute(f"alter table {table} {added}, add none text default null")
    texts = ", ".join(f"format('%s', c{n})" for n in range(len(defaults)))
    expected = database.query(f"select {texts}, null from plain")[0]
    for relation in _published(database).values():
        found = {column.name: column.missing for column in relation.columns[1:]}
        assert found == dict(zip(found, expected, strict=True)), relation.table


@pytest.mark.postgres
@pytest.mark.every_pg
def test_types_are_resolved_below_domains_and_arrays(database: Database) -> None:
    """G9."""
    database.execute(
        """
        create schema shop;
        create type shop.mood as enum ('a');
        create domain shop.amount as numeric(10, 2);
        create domain shop.outer_amount as shop.amount;
        create domain shop.ints as int[];
        create type shop.pair as (a int, b text);
        create table t (id int primary key, mood shop.mood, moods shop.mood[], amount
        shop.outer_amount,
            amounts shop.outer_amount[], ints shop.ints, numerics numeric(12, 3)[], names
            varchar(7)[], pair shop.pair, vector int2vector, name name, span int4range);
        create publication pub for table t
        """
    )
    [relation] = _published(database).values()
    found = {
        column.name: (
            column.type,
            column.kind,
            column.base_type,
            column.base_typmod,
            column.element_type,
            column.element_typmod,
        )
        for column in relation.columns
    }
    numeric_10_2, numeric_12_3 = (10 << 16 | 2) + 4, (12 << 16 | 3) + 4
    assert found == {
        "id": ("integer", "b", "int4", -1, None, -1),
        "mood": ("shop.mood", "e", "shop.mood", -1, None, -1),
        "moods": ("shop.mood[]", "e", "shop._mood", -1, "shop.mood", -1),
        "amount": ("shop.outer_amount", "b", "numeric", numeric_10_2, None, -1),
        "amounts": (
            "shop.outer_amount[]", "b", "shop._outer_amount", -1, "numeric", numeric_10_2,
        ),
        "ints": ("shop.ints", "b", "_int4", -1, "int4", -1),
        "numerics": ("numeric[]", "b", "_numeric", numeric_12_3, "numeric", numeric_12_3),
        "names": ("character varying[]", "b", "_varchar", 11, "varchar", 11),
        "pair": ("shop.pair", "c", "shop.pair", -1, None, -1),
        "vector": ("int2vector", "b", "int2vector", -1, None, -1),
        "name": ("name", "b", "name", -1, None, -1),
        "span": ("int4range", "r", "int4range", -1, None, -1),
    }  # fmt: skip


@pytest.mark.postgres
@pytest.mark.every_pg
def test_the_catalog_gives_the_relation_that_the_stream_announces(
    database: Database, conn: Connection
) -> None:
    """D9: for each kind of replica identity, snapshot and stream have one relation version."""
    database.execute(
        """
        create table by_default (b text, a int, c int, primary key (c, a));
        create table by_index (a int not null, b int not null, c text);
        create unique index by_index_key on by_index (b, a);
        alter table by_index replica identity using index by_index_key;
        create table by_full (a int, b text);
        alter table by_full replica identity full;
        create table by_nothing (a int primary key);
        alter table by_nothing replica identity nothing;
        create table including (a int, b int, c int, primary key (a) include (c));
        create table deferred (a int primary key deferrable);
        create table parts (a int, b int, primary key (a, b)) partition by range (a);
        create table part_1 (b int not null, a int not null);
        alter table parts attach partition part_1 for values from (0) to (10);
        create table generated (a int primary key, b int generated always as (a + 1) stored, c int);
        alter table generated drop column c, add column d text;
        create publication pub for all tables with (publish_via_partition_root = true)
        """
    )
    tables = "by_default by_index by_full by_nothing including deferred parts generated".split()
    rows = {"by_default": "('x', 1, 2)", "including": "(1, 2, 3)", "parts": "(1, 2)"}
    captured = _captured(
        database,
        *(
            f"insert into {table} select * from (values {rows[table]}) v"
            if table in rows
            else f"insert into {table} (a{', b' if table == 'by_index' else ''}) "
            f"values (1{', 2' if table == 'by_index' else ''})"
            for table in tables
        ),
    )
    published = _published(database)
    # The leaf partition of a row is announced in addition to the published root.
    assert captured.relations.pop("public.part_1").columns[0].name == "b"
    assert captured.relations.keys() == {f"public.{table}" for table in tables}
    assert captured.relations.keys() <= published.keys()
    resolver = CatalogResolver(database.settings(), conn, "pub")
    xid = database.value("select pg_current_xact_id()::text::bigint")
    for name, announced in captured.relations.items():
        assert resolver.complete(announced, NEVER, xid) == Completion(published[name]), name
        assert (
            complete_relation(announced, {announced.relation_id: published[name]})
            == published[name]
        )
    assert published["public.by_default"].primary_key == ("c", "a")
    assert published["public.including"].primary_key == ("a",)
    assert published["public.deferred"].primary_key == ("a",)
    assert published["public.by_index"].primary_key == ()
    assert [c.attnum for c in published["public.generated"].columns] == [1, 4]


@pytest.mark.postgres
def test_a_publication_of_a_schema_and_column_lists_apply(
    database: Database, conn: Connection
) -> None:
    """D12."""
    database.execute(
        """
        create schema a; create schema b;
        create table a.one (id int primary key, x text); create table b.two (id int primary key, x
        text, y text); create publication in_schema for tables in schema a;
        create publication with_columns for table b.two (id, y)
        """
    )
    assert list(_published(database, "in_schema")) == ["a.one"]
    [relation] = _published(database, "with_columns").values()
    assert [(c.name, c.attnum) for c in relation.columns] == [("id", 1), ("y", 3)]
    captured = _captured(
        database, "insert into b.two values (1, 'x', 'y')", publication="with_columns"
    )
    resolver = CatalogResolver(database.settings(), conn, "with_columns")
    assert resolver.complete(captured.relations["b.two"], NEVER, 3).relation == relation


@pytest.mark.postgres
def test_published_tables_have_their_row_filter_and_partitioning(database: Database) -> None:
    database.execute(
        """
        create table t (id int primary key);
        create table p (id int primary key) partition by range (id);
        create publication pub for table t where (id > 5), p with (publish_via_partition_root =
        true)
        """
    )
    with query_connection(database.settings(), "test") as conn:
        tables = {t.relation.table: t for t in published_tables(conn, "pub")}
    assert (tables["t"].is_partitioned, tables["t"].row_filter) == (False, "(id > 5)")
    assert (tables["p"].is_partitioned, tables["p"].row_filter) == (True, None)


@pytest.mark.postgres
def test_the_error_about_a_missing_publication_lists_the_existing_publications(
    database: Database,
) -> None:
    database.execute("create publication other")
    with pytest.raises(
        ConfigurationError,
        match=r"Publication pub does not exist.*it has: "
        "other.*create",
    ):
        _published(database)


@pytest.mark.postgres
def test_an_old_announcement_is_completed_from_a_newer_catalog(
    database: Database, conn: Connection
) -> None:
    """F6: a backlog is read after an ALTER TABLE."""
    database.execute(
        "create type mood as enum ('a'); create table t (id int primary key, a int, b mood, c "
        "text);"
        "create publication pub for table t"
    )
    before = _published(database)["public.t"]
    database.execute(
        "alter table t drop column b, alter column a type bigint; alter table t rename c to d"
    )
    resolver = CatalogResolver(database.settings(), conn, "pub")
    announced = replace(
        before,
        columns=tuple(Column(c.name, c.type_oid, c.typmod, c.is_key) for c in before.columns),
    )
    completed = resolver.complete(announced, NEVER, 3).relation
    assert [(c.name, c.attnum, c.base_type) for c in completed.columns] == [
        ("id", 1, "int4"),
        ("a", 2, "int4"),
        ("b", 3, "public.mood"),
        ("c", 4, "text"),
    ]
    database.execute("drop table t; drop type mood")
    gone = CatalogResolver(database.settings(), conn, "pub").complete(announced, NEVER, 3).relation
    assert [(c.name, c.attnum, c.type) for c in gone.columns] == [
        ("id", None, "integer"),
        ("a", None, "integer"),
        ("b", None, None),
        ("c", None, "text"),
    ]


@pytest.mark.parametrize(
    ("announced", "catalog", "expected"),
    [
        pytest.param("abc", {"a": 1, "b": 2, "c": 3}, [1, 2, 3], id="unchanged"),
        pytest.param("axc", {"a": 1, "b": 2, "c": 3}, [1, 2, 3], id="renamed between certain ones"),
        pytest.param("abc", {"a": 1, "c": 3}, [1, 2, 3], id="dropped between certain ones"),
        pytest.param("abc", {"b": 2, "c": 3, "a": 5}, [1, 2, 3], id="dropped and added again"),
        pytest.param(
            "abx", {"a": 1, "b": 2, "c": 3}, [1, 2, None], id="last one renamed: uncertain"
        ),
        pytest.param("axc", {"a": 1, "c": 4}, [1, None, 4], id="one of two dropped: uncertain"),
        pytest.param("bac", {"b": 2, "c": 4, "a": 5}, [2, 3, 4], id="the same in the middle"),
        pytest.param("abc", {"c": 3, "a": 5, "b": 6}, [1, 2, 3], id="two dropped and added again"),
        pytest.param("abx", {"x": 4, "a": 5, "b": 6}, [None, None, 4], id="uncertain which"),
        pytest.param("ac", {"a": 1, "b": 2, "c": 3}, [1, 3], id="column list"),
        pytest.param("ab", {}, [None, None], id="table dropped"),
    ],
)
def test_attnums_are_matched_by_name_and_never_against_the_order(
    announced: str, catalog: dict[str, int], expected: list[int | None]
) -> None:
    def relation(columns: list[Column]) -> Relation:
        return Relation(7, "s", "t", ReplicaIdentity.DEFAULT, tuple(columns))

    known = relation(
        [Column(name, 23, attnum=attnum, type="integer") for name, attnum in catalog.items()]
    )
    completed = complete_relation(
        relation([Column(name, 23) for name in announced]), {7: known} if catalog else {}
    )
    assert [column.attnum for column in completed.columns] == expected


@pytest.mark.parametrize(("announced", "expected"), [("abc", 4), ("ab", None), ("xy", None)])
def test_the_attribute_count_is_unknown_if_the_catalog_may_be_newer(
    announced: str, expected: int | None
) -> None:
    """F6: a column that was added after the message must not count as a column of the message."""
    columns = tuple(Column(name, 23, attnum=place) for place, name in enumerate("abc", 1))
    known = Relation(7, "public", "t", ReplicaIdentity.DEFAULT, columns, attribute_count=4)
    message = replace(known, columns=tuple(Column(name, 23) for name in announced))
    assert complete_relation(message, {7: known}).attribute_count == expected
