"""A backlog of schema changes and rows, read long afterwards by one sync.

Each table has changes of its own. One sync captures all of them in one window. Then SCD1 equals the
source, the current rows of SCD2 equal SCD1, and rebuilds from the raw zone give the same tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge import rebuild_table
from pgcdc_assets.raw.relations.schema_events import SchemaChange
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

_TEXT = "create table {t} (id int primary key, v text); insert into {t} values (1, 'a'), (2, 'b')"
_NUMBERS = (
    "create table {t} (id int primary key, x int, y int);"
    "insert into {t} select i, i, 100 + i from generate_series(1, 4) i"
)


@dataclass(frozen=True)
class Backlog:
    """The changes of one table.

    Attributes:
        create: statements before the first sync.
        transactions: statements after it, each entry one transaction.
        heals: the changes need a new snapshot.
    """

    create: str
    transactions: Sequence[str]
    heals: bool = False


_SWAP = (
    "alter table {t} rename x to z; alter table {t} rename y to x; alter table {t} rename z to y;"
)
# What a Relation message does not contain, or no row event describes.
_HARDEST = {
    "swapped_twice": Backlog(
        _NUMBERS,
        [
            "insert into {t} values (20, 1, 2);" + _SWAP
            + "insert into {t} (id, x, y) values (21, 1, 2);" + _SWAP
            + "insert into {t} (id, x, y) values (22, 1, 2)",
        ],
    ),
    "dropped_added": Backlog(
        _NUMBERS,
        [
            "insert into {t} values (20, 1, 2); update {t} set y = 50 where id = 1;"
            "alter table {t} drop y, add y int; insert into {t} values (21, 1, 2)"
        ],
        heals=True,
    ),
    "widened": Backlog(
        "create table {t} (id int primary key, a smallint, f real, n numeric(5, 2), d date,"
        " t timestamp(0)); insert into {t} values (1, 1, 1.1, 1.25, '2024-01-01', '2024-01-01')",
        [
            "alter table {t} alter a type int, alter f type float8, alter n type numeric(9, 4),"
            " alter d type timestamp, alter t type timestamp(6)",
            "insert into {t} values (2, 70000, 1.1, 1.2345, '2024-01-02', '2024-01-01 00:00:00.5')",
            "alter table {t} alter a type bigint, alter n type numeric(20, 8)",
            "insert into {t} values (3, 70000000000, 0.1, 1.23456789, null, null)",
        ],
    ),
    "widened_using": Backlog(
        "create table {t} (id int primary key, a int, w varchar(5));"
        "insert into {t} select i, i, 'w' || i from generate_series(1, 4) i",
        [
            "update {t} set a = 20 where id = 2",
            "alter table {t} alter a type bigint using a::bigint * 2, alter w type text"
            " using upper(w)",
            "insert into {t} values (20, 7, 'new')",
        ],
        heals=True,
    ),
}  # fmt: skip
_OTHERS = {
    "back_and_forth": Backlog(
        _TEXT,
        [
            "alter table {t} add c int", "insert into {t} values (11, 'x', 1)",
            "update {t} set v = 'u' where id = 1", "alter table {t} drop c",
            "insert into {t} values (12, 'y')", "alter table {t} add c text",
            "insert into {t} values (13, 'z', 'text')", "alter table {t} rename v to w",
            "update {t} set w = 'u2' where id = 1", "alter table {t} rename w to v",
            "insert into {t} values (14, 'q', 't')",
        ],
        heals=True,
    ),
    "identities": Backlog(
        "create table {t} (id int primary key, u int not null unique, v text);"
        "insert into {t} select i, i * 10, 'r' from generate_series(1, 5) i",
        [
            "update {t} set v = 'a' where id = 1", "alter table {t} replica identity full",
            "update {t} set v = 'b' where id = 2; delete from {t} where id = 3",
            "alter table {t} replica identity default", "update {t} set id = 44 where id = 4",
        ],
    ),
    "enum": Backlog(
        "create type {t}_e as enum ('a', 'b'); create table {t} (id int primary key, v {t}_e);"
        "insert into {t} values (1, 'a'), (2, 'b')",
        [
            "alter type {t}_e add value 'c'", "insert into {t} values (3, 'c')",
            "alter type {t}_e rename value 'a' to 'z'", "insert into {t} values (4, 'z')",
        ],
        heals=True,
    ),
    "domains": Backlog(
        "create domain {t}_d as numeric(8, 2); create domain {t}_dd as {t}_d;"
        "create table {t} (id int primary key, v {t}_dd); insert into {t} values (1, 1.5)",
        [
            "alter domain {t}_d add check (value < 100)", "insert into {t} values (2, 2.5)",
            "alter domain {t}_dd set not null", "insert into {t} values (3, 3.5)",
        ],
    ),
    "composite": Backlog(
        "create type {t}_c as (x int, y text); create table {t} (id int primary key, v {t}_c);"
        "insert into {t} values (1, (1, 'a'))",
        ["alter type {t}_c add attribute z int", "insert into {t} values (2, (2, 'b', 3))"],
        heals=True,
    ),
    "moved": Backlog(
        _TEXT + "; create schema {t}_s",
        [
            "update {t} set v = 'before' where id = 1",
            "alter table {t} set schema {t}_s; alter table {t}_s.{t} rename to {t}_old;"
            "create table {t} (id int primary key, v text, n int);"
            "alter publication pub add table {t}; insert into {t} values (7, 'new', 7);"
            "update {t}_s.{t}_old set v = 'after' where id = 2",
            "insert into {t} values (8, 'new', 8)",
            "update {t}_s.{t}_old set v = 'after' where id = 1",
        ],
        heals=True,
    ),
    "truncated": Backlog(
        _TEXT,
        [
            "truncate {t}; alter table {t} add c int default 5 not null;"
            "insert into {t} values (9, 'n', 1)",
            "update {t} set v = 'm' where id = 9",
        ],
    ),
    "default": Backlog(
        _TEXT,
        [
            "alter table {t} add c int default 5", "update {t} set v = 'one' where id = 1",
            "alter table {t} alter c set default 6", "insert into {t} (id, v) values (9, 'n')",
            "alter table {t} rename c to d",
        ],
    ),
    "identity_column": Backlog(
        _TEXT,
        ["alter table {t} add c bigint generated always as identity",
         "insert into {t} (id, v) values (9, 'n')"],
        heals=True,
    ),
    "key_order": Backlog(
        "create table {t} (a int, b int, v text, primary key (a, b));"
        "insert into {t} select i, i + 10, 'r' from generate_series(1, 4) i",
        [
            "alter table {t} drop constraint {t}_pkey, add primary key (b, a)",
            "update {t} set v = 'x' where a = 1", "alter table {t} rename a to c",
            "update {t} set c = 99 where c = 2", "delete from {t} where c = 3",
        ],
    ),
    "another_key": Backlog(
        _TEXT,
        [
            "alter table {t} add c int", "update {t} set c = id",
            "alter table {t} drop constraint {t}_pkey, add primary key (c)",
            "update {t} set id = 50 where c = 2",
        ],
        heals=True,
    ),
    "created_again": Backlog(
        _TEXT,
        [
            "update {t} set v = 'last' where id = 1", "drop table {t}",
            "create table {t} (id int primary key, v text, w int)",
            "insert into {t} values (1, 'again', 1)", "alter publication pub add table {t}",
            "insert into {t} values (2, 'again', 1)",
        ],
        heals=True,
    ),
}  # fmt: skip


def _start(orchestrated: Orchestrated, backlogs: dict[str, Backlog]) -> Orchestrated:
    execute = orchestrated.database.execute
    for name, backlog in backlogs.items():
        execute(backlog.create.format(t=name))
    execute(f"drop publication pub; create publication pub for table {', '.join(backlogs)}")
    tables = tuple(CdcTable("public", name, (1, 2)) for name in backlogs)
    return replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))


def _rows(
    live: Orchestrated, spark: SparkSession, table: str, scd: int, *columns: str
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the names of the columns, or the given ones, and the rows as texts."""
    frame = spark.read.format("delta").load(table_path(live.lake, NAME, "public", table, scd))
    names = list(columns) or sorted(frame.columns)
    if columns and scd == 2:
        frame = frame.where("_is_current")
    rows = frame.select(*[f"`{name}`" for name in names]).collect()
    return names, sorted(tuple(map(str, row)) for row in rows)


def _check(live: Orchestrated, spark: SparkSession, backlogs: dict[str, Backlog]) -> None:
    snapshots = [s.table for s in live.zone.snapshots.complete_snapshots()]
    for name, backlog in backlogs.items():
        assert live.equals_source(name), name
        own = [c for c in _rows(live, spark, name, 1)[0] if not c.startswith("_")]
        current = _rows(live, spark, name, 1, *own)
        assert _rows(live, spark, name, 2, *own) == current, name
        assert (snapshots.count(name) > 1) == backlog.heals, name


def _write(live: Orchestrated, backlogs: dict[str, Backlog]) -> None:
    for name, backlog in backlogs.items():
        for statements in backlog.transactions:
            live.database.transaction(statements.format(t=name))


@pytest.mark.sampled
def test_one_sync_is_right_where_the_stream_is_not_enough(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """F4 to F6: names in one transaction, a column that came again, and USING for a wider type."""
    live = _start(orchestrated, _HARDEST)
    live.sync()
    _write(live, _HARDEST)
    live.sync()
    _check(live, spark, _HARDEST)
    events = live.zone.schema_events.read()
    assert {e.table.table for e in events if e.change is SchemaChange.VALUES_CONFIRMED} == {
        "widened"
    }
    done = len(events)
    assert live.sync().merge_count == 0
    assert len(live.zone.schema_events.read()) == done


@pytest.mark.soak
def test_one_sync_follows_a_backlog_of_every_kind(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """F1 to F6, F8 to F11: SCD1, SCD2, and both rebuilt from the raw zone."""
    live = _start(orchestrated, _OTHERS)
    live.sync()
    _write(live, _OTHERS)
    live.sync()
    _check(live, spark, _OTHERS)
    for target in live.capture.tables:
        for scd in target.scd:
            merged = _rows(live, spark, target.table, scd)
            rebuild_table(spark, live.zone, target, scd)
            assert _rows(live, spark, target.table, scd) == merged, (target.table, scd)
