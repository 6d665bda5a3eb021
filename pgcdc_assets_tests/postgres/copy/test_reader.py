"""The rows that COPY returns, compared with the stream's texts of the same rows."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from pgcdc_assets.errors import ConfigurationError, TableChanged, TransientError
from pgcdc_assets.postgres.catalog.relations import published_tables
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.copy.reader import copy_published
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.postgres.wire import peek

pytestmark = pytest.mark.postgres

# Types with values whose text a cast would change. Each value and NULL are separate rows.
TYPES = {
    "bool": ["true", "false"],
    "char(5)": ["'ab'", "''", "'     '", "E'a\\\\b'"],
    "varchar(9)": ["' x '", "''", "'null'"],
    "text": ["E'tab\\there'", "E'line\\nend\\r'", "E'back\\\\N\\\\s'", "'\\N'", "'äöü €'", "''"],
    '"char"': ["'a'", "''"],
    "name": ["'quoted \"name'"],
    "int2": ["-32768"],
    "int4": ["2147483647"],
    "int8": ["-9223372036854775808"],
    "oid": ["4294967295"],
    "numeric": ["'NaN'", "1e30", "0.000000000000000000001", "-0.50", "10::numeric ^ 200"],
    "numeric(10,2)": ["1.005", "-99999999.99"],
    "float4": ["'NaN'", "'-Infinity'", "1.1", "1e-45"],
    "float8": ["'Infinity'", "0.1", "1e308", "-0.0"],
    "money": ["'-1234567.89'", "'0.01'"],
    "bytea": ["''", "'\\x00ff5c'"],
    "date": ["'infinity'", "'-infinity'", "'0044-03-15 BC'", "'5874897-12-31'"],
    "time": ["'24:00'", "'00:00:00.000001'"],
    "timetz": ["'12:00+05:30'", "'24:00-15:59:59'"],
    "timestamp": ["'infinity'", "'0044-03-15 12:00 BC'", "'294276-12-31 23:59:59.999999'"],
    "timestamptz": ["'-infinity'", "'2024-03-31 02:30 Europe/Berlin'", "'4713-01-01 BC'"],
    "interval": ["'1 year -2 months 3 days -04:05:06.7'", "'0'"],
    "uuid": ["'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'"],
    "json": ['\'{"a": 1, "a":  2}\'', "'null'", "'\"\\u00e4\\\\n\"'"],
    "jsonb": ['\'{"b": 1.10, "a": [null, "x\\ty"]}\'', "'null'"],
    "inet": ["'10.0.0.1'", "'10.0.0.1/8'", "'::1'"],
    "cidr": ["'10.0.0.0/8'", "'10.1.2.3/32'"],
    "macaddr": ["'08:00:2b:01:02:03'"],
    "macaddr8": ["'08:00:2b:01:02:03:04:05'"],
    "bit(3)": ["B'101'"],
    "varbit": ["B''", "B'1'"],
    "point": ["'(1,2.5)'"],
    "box": ["'(1,2),(3,4)'"],
    "box[]": ["'{(1,2),(3,4);(5,6),(7,8)}'"],
    "path": ["'[(0,0),(1,1)]'"],
    "int4range": ["'[1,5)'", "'empty'", "'(,)'"],
    "tsrange": ["'[2020-01-01,)'"],
    "nummultirange": ["'{[1,2),[3,)}'"],
    "tsvector": ["'a fat cat'"],
    "tsquery": ["'fat & cat'"],
    "xid": ["'42'"],
    "pg_lsn": ["'16/B374D848'"],
    "regclass": ["'pg_class'", "'shop.pair'"],
    "int2vector": ["'1 2 3'"],
    "int4[]": ["'{}'", "'{1,NULL,3}'", "'[2:3]={1,2}'", "'{{1,2},{3,4}}'"],
    "text[]": ['\'{"a b","NULL",NULL,"","x\\"y\\\\\\\\z","{}"}\'', "array[E'tab\\t', E'nl\\n']"],
    "bool[]": ["'{t,f,NULL}'"],
    "bytea[]": ["array['\\x00'::bytea]"],
    "timestamptz[]": ["'{infinity,2020-01-01}'"],
    "shop.mood": ["'sad'", "'very, happy'"],
    "shop.mood[]": ["'{sad,\"very, happy\"}'"],
    "shop.amount": ["1.5"],
    "shop.amount[]": ["'{1.5,2}'"],
    "shop.outer_amount": ["3"],
    "shop.pair": ["row(1, E'a\"b,\\\\')", "row(null, null)"],
    "shop.pair[]": ["array[row(1,'x')::shop.pair, null]"],
    "shop.span": ["'[a,b)'"],
}


def _create_types(database: Database) -> None:
    database.execute(
        """
        create schema shop;
        create type shop.mood as enum ('sad', 'very, happy');
        create domain shop.amount as numeric(10, 2);
        create domain shop.outer_amount as shop.amount;
        create type shop.pair as (a int, b text);
        create type shop.span as range (subtype = text)
        """
    )


def _fill_every_type(database: Database) -> None:
    columns = ", ".join(f"c{n} {type_name}" for n, type_name in enumerate(TYPES))
    database.execute(f"create table public.every_type (id int primary key, {columns})")
    database.execute("create publication pub for table public.every_type")


def _insert_every_type(database: Database) -> None:
    row = 0
    for n, values in enumerate(TYPES.values()):
        for value in values:
            row += 1
            database.execute(f"insert into every_type (id, c{n}) values ({row}, {value})")
    row += 1
    firsts = ", ".join(values[0] for values in TYPES.values())
    database.execute(f"insert into every_type values ({row}, {firsts})")


def _copy(database: Database, publication: str = "pub") -> dict[str, list[Any]]:
    """Copy a publication's tables as of one snapshot."""
    settings = database.settings()
    copies: dict[str, list[Any]] = {}
    # A temporary slot lives until its walsender has noticed the end of the connection.
    slot = f"copy_{publication}_{database.name}"
    with create_slot(settings, slot, temporary=True) as snapshot:
        with query_connection(settings, "test") as conn:
            tables = published_tables(conn, publication)
        for table in tables:
            batches = copy_published(settings, table, snapshot.snapshot_name)
            rows = [row for batch in batches for row in batch.column("new").to_pylist()]
            copies[table.relation.qualified_name] = rows
    return copies


@pytest.mark.every_pg
def test_copied_text_of_every_type_is_the_streamed_text(database: Database) -> None:
    """B15, G: with database settings that change the output of types."""
    _create_types(database)
    _fill_every_type(database)
    with create_slot(database.settings(), f"s_{database.name}"):
        pass
    _insert_every_type(database)
    for setting in (
        "datestyle = 'German'",
        "intervalstyle = 'iso_8601'",
        "timezone = 'Asia/Kathmandu'",
        "extra_float_digits = -5",
        "bytea_output = 'escape'",
        "quote_all_identifiers = on",
        "search_path = shop, public",
    ):
        database.execute(f'alter database "{database.name}" set {setting}')
    with query_connection(database.settings(), "test") as conn:
        streamed = peek(conn, f"s_{database.name}", "pub").rows["public.every_type"]
    assert len(streamed) == sum(map(len, TYPES.values())) + 1
    by_id = {row[0]: row for row in _copy(database)["public.every_type"]}
    for row in streamed:
        copied = by_id[row[0]]
        differing = [name for name, s, c in zip(["id", *TYPES], row, copied, strict=True) if s != c]
        assert not differing


def test_a_table_is_copied_without_the_tables_that_inherit_from_it(database: Database) -> None:
    """C7."""
    database.execute(
        "create table parent (id int primary key); create table child () inherits (parent)"
    )
    database.execute("create publication pub for table only parent")
    database.execute("insert into parent values (1); insert into child values (2)")
    assert _copy(database) == {"public.parent": [["1"]]}


def test_a_partitioned_table_is_copied_under_its_published_name(
    database: Database,
) -> None:
    """C7, E1."""
    database.execute(
        """
        create table p (id int primary key) partition by range (id);
        create table p1 partition of p for values from (0) to (10);
        create table p2 partition of p for values from (10) to (20);
        create publication pub for table p with (publish_via_partition_root = true);
        create publication leaves for table p;
        insert into p values (1), (11)
        """
    )
    assert {name: sorted(rows) for name, rows in _copy(database).items()} == {
        "public.p": [["1"], ["11"]]
    }
    assert _copy(database, "leaves") == {"public.p1": [["1"]], "public.p2": [["11"]]}


def test_column_list_row_filter_and_generated_columns_apply_to_the_copy(database: Database) -> None:
    """D13, F12."""
    database.execute(
        """
        create table t (id int primary key, secret text, kind text, twice int generated always as
        (id * 2) stored); create publication pub for table t (id, kind) where (id > 1);
        create publication whole for table t;
        insert into t values (1, 's', 'a'), (2, 's', 'b')
        """
    )
    assert _copy(database) == {"public.t": [["2", "b"]]}
    assert sorted(_copy(database, "whole")["public.t"]) == [["1", "s", "a"], ["2", "s", "b"]]


def test_published_generated_columns_are_copied(server18: object, database: Database) -> None:
    """F12: Postgres 18 can publish stored generated columns."""
    if database.server.version < 18:
        pytest.skip("publish_generated_columns is new in Postgres 18")
    database.execute(
        "create table t (id int primary key, twice int generated always as (id * 2) stored)"
    )
    database.execute("create publication pub for table t with (publish_generated_columns = stored)")
    with create_slot(database.settings(), f"s_{database.name}"):
        pass
    database.execute("insert into t values (4)")
    with query_connection(database.settings(), "test") as conn:
        assert peek(conn, f"s_{database.name}", "pub").rows == {"public.t": [["4", "8"]]}
    assert _copy(database) == {"public.t": [["4", "8"]]}


def test_row_level_security_is_refused_instead_of_hiding_rows(database: Database) -> None:
    """B13."""
    database.execute(
        """
        create table t (id int primary key);
        create publication pub for table t;
        insert into t values (1);
        alter table t enable row level security;
        drop role if exists reader; create role reader login replication; grant select on t to
        reader
        """
    )
    settings = database.settings()
    limited = type(settings)(settings.conninfo.replace("user=postgres", "user=reader"), "test")
    try:
        with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
            with query_connection(settings, "test") as conn:
                [table] = published_tables(conn, "pub")
            with pytest.raises(
                ConfigurationError,
                match=r'public\.t .*alter role "reader" '
                "bypassrls",
            ):
                list(copy_published(limited, table, snapshot.snapshot_name))
            database.execute(
                "alter table t disable row level security; revoke select on t from reader"
            )
            with pytest.raises(
                ConfigurationError,
                match=r'grant select on "public"."t" to '
                '"reader"',
            ):
                list(copy_published(limited, table, snapshot.snapshot_name))
    finally:
        database.execute("drop owned by reader; drop role reader")


@pytest.mark.every_pg
@pytest.mark.parametrize(
    "change",
    [
        "alter table t add column more int default 7",
        "alter table t alter column id type bigint",
        "alter table t rename column note to remark",
        "alter table t drop column note",
        "alter table t rename to u",
        "alter table t rename to u; create table t (id int primary key, note text)",
        "drop table t",
        "alter table t alter column note set data type text using note || '!'",
    ],
)
def test_a_table_altered_after_the_snapshot_is_not_copied(database: Database, change: str) -> None:
    """C13: a rewritten table is empty in the older snapshot."""
    database.execute(
        "create table t (id int primary key, note text); create publication pub for table t"
    )
    database.execute("insert into t values (1, 'x')")
    settings = database.settings()
    with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
        with query_connection(settings, "test") as conn:
            [table] = published_tables(conn, "pub")
        database.execute(change)
        with pytest.raises(TableChanged, match=r"public\.t was altered"):
            list(copy_published(settings, table, snapshot.snapshot_name))


def test_a_table_altered_between_its_lookup_and_the_snapshot_is_not_copied(
    database: Database,
) -> None:
    """C13: both queries of the catalog agree, but the columns of the lookup differ."""
    database.execute(
        "create table t (id int primary key, note text); create publication pub for table t"
    )
    settings = database.settings()
    with query_connection(settings, "test") as conn:
        [table] = published_tables(conn, "pub")
    database.execute("alter table t alter column id type bigint")
    with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
        with pytest.raises(TableChanged, match=r"public\.t was altered"):
            list(copy_published(settings, table, snapshot.snapshot_name))


def test_an_ended_snapshot_is_a_transient_error(database: Database) -> None:
    database.execute("create table t (id int primary key); create publication pub for table t")
    settings = database.settings()
    with query_connection(settings, "test") as conn:
        [table] = published_tables(conn, "pub")
    with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
        pass
    with pytest.raises(TransientError, match="does not exist any more"):
        list(copy_published(settings, table, snapshot.snapshot_name))


def test_memory_of_a_copy_does_not_grow_with_the_table(database: Database) -> None:
    """The server waits for a slow consumer, and all rows arrive."""
    database.execute(
        "create table wide (id int primary key, note text); create publication pub for table wide"
    )
    database.execute(
        "insert into wide select i, repeat('x', 1000) from generate_series(1, 50000) i"
    )
    settings = database.settings()
    with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
        with query_connection(settings, "test") as conn:
            [table] = published_tables(conn, "pub")
        batches = copy_published(settings, table, snapshot.snapshot_name, chunk_bytes=100_000)
        row_count = 0
        for number, batch in enumerate(batches):
            row_count += batch.num_rows
            if number % 100 == 0:
                # A few chunks are in the queue, and some bytes are in the sockets' buffers.
                assert _sent_rows(database) < row_count + 20_000
    assert row_count == 50_000


def _sent_rows(database: Database) -> int:
    """Return the number of sent rows after the server stops sending."""
    sent = -1
    while sent != (sent := _rows_of_running_copy(database)):
        time.sleep(0.2)
    return sent


def _rows_of_running_copy(database: Database) -> int:
    found = database.query(
        "select tuples_processed from pg_stat_progress_copy where datname = current_database()"
    )
    return int(found[0][0]) if found else 50_000


def test_an_abandoned_copy_ends_at_once_and_leaves_no_session(
    database: Database,
) -> None:
    """The reader stops before the last row."""
    database.execute(
        "create table slow (id int primary key, note text); create publication pub for table slow"
    )
    database.execute("insert into slow select i, repeat('x', 2000) from generate_series(1, 220) i")
    settings = database.settings()
    with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
        with query_connection(settings, "test") as conn:
            [table] = published_tables(conn, "pub")
        slow = replace(
            table, row_filter="id <= 20 or pg_catalog.pg_sleep(0.5) is not null", publication=""
        )
        batches = copy_published(settings, slow, snapshot.snapshot_name, chunk_bytes=2_000)
        next(batches)
        began = time.monotonic()
        batches.close()
    assert time.monotonic() - began < 30
    sessions = "select count(*) from pg_stat_activity where application_name = 'pgcdc copy test'"
    assert database.value(sessions) == 0
