"""The relation version of a row, also in a backlog (F6)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from pgcdc_assets.protocol.relation import Column
from pgcdc_assets.raw.relations.schema_events import SchemaChange, SchemaEvent
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.proxy import TcpProxy

pytestmark = pytest.mark.postgres


def _attnums_by_row(capturing: Capturing) -> list[dict[str, int | None]]:
    """Return the attnums of each captured row's columns, in stream order."""
    versions = {
        (v.relation.relation_id, v.version): {c.name: c.attnum for c in v.relation.columns}
        for v in capturing.zone.relations.versions(1)
    }
    return [versions[row["relation_id"], row["relation_version"]] for row in capturing.rows()]


def test_a_column_that_is_dropped_and_added_is_another_column(
    capturing: Capturing,
) -> None:
    """F4."""
    capturing.begin("create table t (id int primary key, a int, b int)")
    database = capturing.database
    database.execute("insert into t values (1, 10, 20)")
    capturing.capture()
    database.execute("insert into t values (2, 10, 20)")
    database.execute("alter table t drop column b")
    database.execute("alter table t add column b int")
    database.execute("insert into t values (3, 10, 30)")
    capturing.capture()
    before, after = {"id": 1, "a": 2, "b": 3}, {"id": 1, "a": 2, "b": 4}
    assert _attnums_by_row(capturing) == [before, before, after]


def test_two_columns_with_exchanged_names_keep_their_attnums(capturing: Capturing) -> None:
    capturing.begin("create table t (id int primary key, a int, b int)")
    database = capturing.database
    database.execute("insert into t values (1, 10, 20)")
    capturing.capture()
    database.execute("insert into t values (2, 10, 20)")
    database.transaction(
        "alter table t rename a to c",
        "alter table t rename b to a",
        "alter table t rename c to b",
    )
    database.execute("insert into t values (3, 10, 20)")
    capturing.capture()
    before, after = {"id": 1, "a": 2, "b": 3}, {"id": 1, "b": 2, "a": 3}
    assert _attnums_by_row(capturing) == [before, before, after]


def test_a_schema_that_recurs_within_a_backlog_is_identified_by_its_transactions(
    capturing: Capturing,
) -> None:
    """F6: a column is renamed, another column gets its name, and the first column is dropped."""
    capturing.begin("create table t (id int primary key, b int)")
    database = capturing.database
    database.execute("insert into t values (1, 20)")
    capturing.capture()
    database.execute("insert into t values (2, 20)")
    database.execute("alter table t rename b to old")
    database.execute("alter table t add column b int")
    database.execute("alter table t drop column old")
    database.execute("insert into t values (3, 30)")
    report = capturing.capture()
    before, after = {"id": 1, "b": 2}, {"id": 1, "b": 3}
    assert _attnums_by_row(capturing) == [before, before, after]
    assert not report.warnings


def _uncertain(capturing: Capturing) -> list[SchemaEvent]:
    events = capturing.zone.schema_events.read()
    found = [event for event in events if event.change is SchemaChange.COLUMNS_UNCERTAIN]
    assert all(event.needs_snapshot for event in found)
    return found


# Statements of transactions, each list one of them; the attnums of the rows that they write; and
# whether they leave it open which columns are meant.
_BACKLOGS: dict[str, tuple[list[list[str]], list[dict[str, int]], bool]] = {
    "swapped and back in one transaction": (
        [
            [
                "alter table t rename a to c; alter table t rename b to a;"
                "alter table t rename c to b; insert into t values (2, 1, 2)",
                "alter table t rename a to c; alter table t rename b to a;"
                "alter table t rename c to b; insert into t values (3, 1, 2)",
            ]
        ],
        [{"id": 1, "b": 2, "a": 3}, {"id": 1, "a": 2, "b": 3}],
        False,
    ),
    "dropped in one transaction": (
        [["insert into t values (2, 1, 2)", "alter table t drop a", "insert into t values (3, 2)"]],
        [{"id": 1, "a": 2, "b": 3}, {"id": 1, "b": 3}],
        False,
    ),
    "another name in one transaction": (
        [
            [
                "insert into t values (2, 1, 2)",
                "alter table t drop b, add c int",
                "insert into t values (3, 1, 3)",
            ]
        ],
        [{"id": 1, "a": 2, "b": 3}, {"id": 1, "a": 2, "c": 4}],
        False,
    ),
    "renamed, dropped, and renamed columns after it": (
        [
            ["alter table t rename a to x"],
            ["insert into t values (2, 1, 2)"],
            ["alter table t drop x, add y text"],
            ["insert into t values (3, 1, 'y')"],
            ["alter table t rename b to z; alter table t rename y to b"],
            ["insert into t values (4, 1, 'y')"],
            ["alter table t drop b, drop z"],
        ],
        [{"id": 1, "x": 2, "b": 3}, {"id": 1, "b": 3, "y": 4}, {"id": 1, "z": 3, "b": 4}],
        False,
    ),
    "added, dropped, and added with another type": (
        [
            ["alter table t add c int default 7"],
            ["insert into t values (2, 1, 2, 3)"],
            ["alter table t drop c"],
            ["insert into t values (3, 1, 2)"],
            ["alter table t add c text"],
            ["insert into t values (4, 1, 2, 'c')"],
        ],
        [
            {"id": 1, "a": 2, "b": 3, "c": 4},
            {"id": 1, "a": 2, "b": 3},
            {"id": 1, "a": 2, "b": 3, "c": 5},
        ],
        False,
    ),
    "altered and dropped": (
        [
            ["insert into t values (2, 1, 2)"],
            ["alter table t alter a type bigint"],
            ["insert into t values (3, 1, 2)"],
            ["alter table t alter a type text"],
            ["alter table t rename a to x"],
            ["insert into t values (4, 'x', 2)"],
            ["alter table t drop x, add z int, add a int"],
        ],
        [{"id": 1, "a": 2, "b": 3}, {"id": 1, "a": 2, "b": 3}, {"id": 1, "x": 2, "b": 3}],
        False,
    ),
    "renamed to the name of a later column": (
        [
            ["alter table t rename b to c"],
            ["insert into t values (2, 1, 2)"],
            ["alter table t drop c"],
            ["alter table t add c int"],
        ],
        [{"id": 1, "a": 2, "c": 3}],
        True,
    ),
    "dropped and added in one transaction": (
        [
            [
                "insert into t values (2, 1, 2)",
                "alter table t drop b, add b int",
                "insert into t values (3, 1, 3)",
            ]
        ],
        [],
        True,
    ),
    "dropped and added in a subtransaction": (
        [["savepoint s; alter table t drop b, add b int", "insert into t values (2, 1, 2)"]],
        [],
        True,
    ),
    "dropped and added": (
        [
            ["insert into t values (2, 1, 2)"],
            ["alter table t drop b, add b int"],
            ["insert into t values (3, 1, 3)"],
        ],
        [{"id": 1, "a": 2, "b": 3}, {"id": 1, "a": 2, "b": 4}],
        True,
    ),
}


def test_many_dropped_columns_of_a_backlog_are_distinguished(capturing: Capturing) -> None:
    """A column is dropped and another one added for each row, and nothing is announced before."""
    capturing.begin("create table t (id int primary key, c0 int, c1 int)")
    database = capturing.database
    for number in range(30):
        database.execute(f"insert into t values ({number}, 1, 2)")
        database.execute(f"alter table t drop c{number}; alter table t add c{number + 2} int")
    capturing.capture()
    assert _attnums_by_row(capturing) == [
        {"id": 1, f"c{number}": number + 2, f"c{number + 1}": number + 3} for number in range(30)
    ]
    changes = {event.change for event in capturing.zone.schema_events.read()}
    assert SchemaChange.COLUMNS_UNCERTAIN not in changes


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.parametrize("name", _BACKLOGS)
def test_rows_on_both_sides_of_ddl_in_a_transaction_cause_a_warning(
    capturing: Capturing, name: str
) -> None:
    """F4, F6: where two columns are equally likely, the table gets a new snapshot."""
    transactions, expected, is_open = _BACKLOGS[name]
    capturing.begin("create table t (id int primary key, a int, b int, gone int)")
    database = capturing.database
    database.execute("alter table t drop gone; insert into t values (1, 10, 20)")
    capturing.capture()
    before = len(capturing.rows())
    for statements in transactions:
        database.transaction(*statements)
    capturing.capture()
    found = _attnums_by_row(capturing)[before:]
    if expected:
        shift = [{k: v + (v > 3) for k, v in row.items()} for row in expected]
        assert found == shift
    found_open = _uncertain(capturing)
    assert bool(found_open) == is_open
    # From the next window on, the catalog of that time is known.
    database.transaction("insert into t (id) values (100)")
    capturing.capture()
    assert _uncertain(capturing) == found_open
    recorded = len(capturing.zone.schema_events.read())
    database.transaction("analyze t", "insert into t (id) values (101)")
    capturing.capture()
    assert len(capturing.zone.schema_events.read()) == recorded


@pytest.mark.every_pg
def test_the_default_of_an_added_column_is_known_after_a_wider_type(capturing: Capturing) -> None:
    """F2, F5: no row follows the wider type, and ALTER TYPE does not rewrite the table."""
    capturing.begin("create table t (id int primary key)")
    execute = capturing.database.execute
    execute("insert into t values (1)")
    capturing.capture()
    execute(
        "alter table t add a varchar(3) default 'x', add b varchar(4) default 'NULL',"
        " add n numeric(4, 2) default 1.5, add at timestamp(0) default '2024-01-01'"
    )
    execute("insert into t values (2)")
    execute(
        "alter table t alter a type varchar(9), alter b type text,"
        " alter n type numeric(9, 2), alter at type timestamp"
    )
    capturing.capture()
    version = capturing.zone.relations.versions(1)[-1]
    assert {column.name: column.missing for column in version.relation.columns} == {
        "id": None,
        "a": "x",
        "b": "NULL",
        "n": "1.50",
        "at": "2024-01-01 00:00:00",
    }
    assert not any(event.needs_snapshot for event in capturing.zone.schema_events.read())


def test_a_column_that_the_publication_does_not_send_is_no_place(capturing: Capturing) -> None:
    """A column list, and columns that were altered since: the names decide."""
    capturing.begin("create table t (id int primary key, a int, b int)")
    database = capturing.database
    database.execute("drop publication pub; create publication pub for table t (id, b)")
    database.execute("insert into t values (1, 10, 20)")
    database.execute("alter table t rename a to c; alter table t alter c type bigint")
    capturing.capture()
    assert _attnums_by_row(capturing) == [{"id": 1, "b": 3}]


@pytest.mark.every_pg(since=15)
def test_a_listed_column_whose_name_another_column_got_keeps_its_attnum(
    capturing: Capturing,
) -> None:
    """F4, F6: a column list follows the attnums, and the other column is not in the list."""
    capturing.begin("create table t (id int primary key, a int)")
    execute = capturing.database.execute
    execute("drop publication pub; create publication pub for table t (id, a)")
    execute("insert into t values (1, 10)")
    capturing.capture()
    execute("alter table t add c int")
    execute("insert into t values (2, 20, 30)")
    execute("alter table t rename a to b")
    execute("insert into t values (3, 20, 30)")
    execute("alter table t rename b to x; alter table t rename c to a")
    execute("alter table t add b int")
    capturing.capture()
    first, second = {"id": 1, "a": 2}, {"id": 1, "b": 2}
    assert _attnums_by_row(capturing) == [first, first, second]
    execute("insert into t values (4, 20, 30)")
    capturing.capture()
    assert _attnums_by_row(capturing)[-1] == {"id": 1, "x": 2}
    changes = [event.change for event in capturing.zone.schema_events.read()]
    assert not any(event.needs_snapshot for event in capturing.zone.schema_events.read()), changes


def test_a_backlog_of_a_column_list_that_is_gone_is_matched_by_name(capturing: Capturing) -> None:
    """The list leaves out a column between others of one type."""
    capturing.begin("create table t (id int primary key, a int, b int)")
    database = capturing.database
    database.execute("insert into t values (1, 10, 20)")
    capturing.capture()
    database.execute("drop publication pub; create publication pub for table t (id, b)")
    database.execute("insert into t values (2, 10, 20)")
    database.execute("alter publication pub set table t")
    database.execute("insert into t values (3, 10, 20)")
    capturing.capture()
    whole = {"id": 1, "a": 2, "b": 3}
    assert _attnums_by_row(capturing) == [whole, {"id": 1, "b": 3}, whole]


def test_a_version_that_another_process_stored_between_two_windows_keeps_its_number(
    capturing: Capturing,
) -> None:
    """A snapshot of a changed table stores a version that the stream announces later."""
    capturing.begin("create table t (id int primary key)")
    first, second = capturing.windows_of(
        "insert into t values (1)", "alter table t add a int; insert into t values (2, 10)"
    )
    with capturing.session() as session:
        session.land(first)
        relations = RawZone(capturing.zone.lake, capturing.zone.name).relations
        [known] = relations.versions(1)
        later = replace(
            known.relation, columns=(*known.relation.columns, Column("b", 25, attnum=3))
        )
        number = relations.register(1, later, first.end)
        relations.flush()
        assert session.land(second).row_count == 1
    assert number == 2
    assert _attnums_by_row(capturing) == [{"id": 1}, {"id": 1, "a": 2}]
    assert [each.version for each in capturing.zone.relations.versions(1)] == [1, 2, 3]


def test_hundreds_of_announcements_are_resolved_over_one_connection(
    capturing: Capturing, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pgcdc_assets.raw.relations.registry import RelationRegistry

    tables = 3
    capturing.begin(*(f"create table t{i} (id int primary key)" for i in range(tables)))
    with capturing.database.connect() as connection, connection.cursor() as cursor:
        for number in range(100):
            for i in range(tables):
                cursor.execute(f"truncate t{i}; insert into t{i} values ({number})")
    scans = []
    read = RelationRegistry._read

    def recorded(registry: RelationRegistry) -> Any:
        scans.append(1)
        return read(registry)

    monkeypatch.setattr(RelationRegistry, "_read", recorded)
    report = capturing.through(proxy.conninfo(capturing.conninfo)).capture()
    assert report.row_count == 200 * tables
    # The stream, and the connection of the lease and the catalog.
    assert proxy.connection_count == 2
    # The resolver, the first poll of the catalog, its search for renamed tables, and the flush read
    # the versions.
    assert len(scans) <= 4


def test_a_table_of_the_most_columns_is_resolved_soon(capturing: Capturing) -> None:
    """The time of a search for places once grew with the third power of the columns: 70 s."""
    columns = ", ".join(f"c{number} int" for number in range(1600))
    capturing.begin(f"create table t ({columns})")
    capturing.database.execute("insert into t default values")
    began = time.monotonic()
    capturing.capture()
    assert time.monotonic() - began < 20
    [version] = capturing.zone.relations.versions(1)
    assert [column.attnum for column in version.relation.columns] == list(range(1, 1601))
