"""Each DDL statement and its schema events, from the stream and from a poll of the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.raw.relations.schema_events import SchemaChange, SchemaEvent
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import create_database, drop_database

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]


def poll(capturing: Capturing, *tables: TableName) -> list[SchemaEvent]:
    with query_connection(capturing.settings, "poll") as conn:
        return poll_catalog(conn, capturing.zone, tables, capturing.publication)


def shown(events: Sequence[SchemaEvent]) -> list[str]:
    """Return events as `table change columns`, with `!` if a snapshot is needed."""
    return sorted(
        f"{e.table.table} {e.change} {','.join(e.columns)}".strip() + "!" * e.needs_snapshot
        for e in events
    )


_TYPES = "create type mood as enum ('a', 'b'); create domain amount as int; create schema s"
_TABLE = (
    "create table {t} (id int primary key, a int, b varchar(10), n numeric(10, 2), m mood,"
    " f float4, d date, x amount); create index on {t} (a); insert into {t} values (1)"
)
_INSERT = "insert into {t} (id, x) values (2, 2)"

# Statements for a table, and the expected events of the table.
_DDL: dict[str, tuple[str, list[str]]] = {
    "nullable": ("alter table {t} add c int", ["column_added c"]),
    "constant": ("alter table {t} add c int default 5 not null", ["column_added c"]),
    "volatile": ("alter table {t} add c float8 default random()", ["column_added c!"]),
    "generated": ("alter table {t} add c int generated always as (id) stored", []),
    "identity": (
        "alter table {t} add c int generated always as identity", ["column_added c!"],
    ),
    "default_later": (
        "alter table {t} add c int; alter table {t} alter c set default 5; update {t} set c = 1;"
        "alter table {t} alter c set not null",
        ["column_added c"],
    ),
    "default_gone": (
        "alter table {t} add c float8 default random(); alter table {t} alter c drop default",
        ["column_added c!"],
    ),
    "dropped": ("alter table {t} drop b", ["column_dropped b"]),
    "dropped_added": (
        "alter table {t} drop a; alter table {t} add a int",
        ["column_added a", "column_dropped a"],
    ),
    "renamed": ("alter table {t} rename a to c", ["column_renamed a,c"]),
    "swapped": (
        "alter table {t} rename a to c; alter table {t} rename n to a;"
        "alter table {t} rename c to n",
        ["column_renamed a,n", "column_renamed n,a"],
    ),
    "widened": (
        "alter table {t} alter a type bigint, alter b type text, alter n type numeric(14, 4),"
        " alter f type float8, alter d type timestamp",
        [*(f"type_widened {name}" for name in "abdfn"), "values_uncertain a,b,n,f,d"],
    ),
    "widened_one": (
        "alter table {t} alter a type bigint", ["type_widened a", "values_uncertain a"],
    ),
    "longer": ("alter table {t} alter b type varchar(20)", ["type_widened b"]),
    "longer_using": (
        "alter table {t} alter b type varchar(20) using upper(b)",
        ["type_widened b", "values_uncertain b"],
    ),
    "domain_base": ("alter table {t} alter x type int", ["type_widened x"]),
    "narrowed": ("alter table {t} alter a type smallint", ["type_changed a!"]),
    "family": ("alter table {t} alter m type text", ["type_changed m!"]),
    "other_key": (
        "update {t} set a = 1; alter table {t} drop constraint {t}_pkey, add primary key (a)",
        ["key_changed a!"],
    ),
    "keyless": ("alter table {t} drop constraint {t}_pkey", ["key_changed!"]),
    "full_identity": ("alter table {t} replica identity full", ["identity_changed"]),
    "named": ("alter table {t} rename to named_again", ["table_renamed"]),
    "moved": ("alter table {t} set schema s", ["table_renamed"]),
    "harmless": (
        "comment on table {t} is 'x'; comment on column {t}.a is 'y'; alter table {t} alter a set"
        " statistics 10; update {t} set a = 1; alter table {t} alter a set not null; alter table"
        " {t} alter b set default 'x'; grant select (a) on {t} to public; create index on {t} (b);"
        " alter table {t} alter a drop not null; alter table {t} set (fillfactor = 90)",
        [],
    ),
    "truncated": ("truncate {t}", []),
    "untouched": ("select 1", []),
}  # fmt: skip
_OF_TYPES = "alter type mood add value 'z'; alter domain amount add check (value > 0)"
_ROWS = {
    "other_key": "insert into {t} (id, a) values (2, 2)",
    "named": "insert into named_again (id) values (2)",
    "moved": "insert into s.{t} (id) values (2)",
}


def _expected() -> list[str]:
    return sorted(f"{name} {change}" for name, (_, changes) in _DDL.items() for change in changes)


def _create(capturing: Capturing) -> None:
    capturing.begin(_TYPES, *(_TABLE.format(t=name) for name in _DDL))


def _alter(capturing: Capturing) -> None:
    for name, (statements, _) in _DDL.items():
        capturing.database.execute(statements.format(t=name))
    capturing.database.execute(_OF_TYPES)


def test_a_poll_finds_each_change_without_a_row(capturing: Capturing) -> None:
    """F1 to F5, F7 to F9, F11."""
    _create(capturing)
    assert poll(capturing) == []
    _alter(capturing)
    before = capturing.flush_lsn()
    found = poll(capturing)
    assert shown(found) == _expected()
    assert all(e.found_by == "catalog" and e.lsn >= before for e in found)
    assert poll(capturing) == []


@pytest.mark.sampled
def test_the_stream_shows_each_change_and_the_poll_adds_no_event(
    capturing: Capturing,
) -> None:
    """F1 to F5, F8, F9, F11."""
    _create(capturing)
    for name in _DDL:
        capturing.database.execute(f"update {name} set f = 2")
    capturing.capture()
    _alter(capturing)
    for name in _DDL:
        capturing.database.execute(_ROWS.get(name, _INSERT).format(t=name))
    assert not capturing.capture().warnings
    events = capturing.zone.schema_events.read()
    assert shown(events) == _expected()
    commits = {row["commit_lsn"] for row in capturing.rows()}
    # The catalog alone shows that the server has rewritten a table.
    shown_by_stream = [e for e in events if e.change is not SchemaChange.VALUES_UNCERTAIN]
    assert all(e.found_by == "stream" and e.lsn in commits for e in shown_by_stream)
    assert poll(capturing) == []


def test_the_stream_does_not_repeat_an_event_of_a_poll(
    capturing: Capturing,
) -> None:
    capturing.begin("create table t (id int primary key, a int); insert into t values (1)")
    capturing.database.execute("insert into t values (2)")
    capturing.capture()
    capturing.database.execute("insert into t values (3); alter table t alter a type smallint")
    assert shown(poll(capturing)) == ["t type_changed a!"]
    capturing.database.execute("insert into t values (4)")
    capturing.capture()
    assert shown(capturing.zone.schema_events.read()) == ["t type_changed a!"]
    versions = capturing.zone.relations.versions(1)
    assert [v.relation.columns[1].base_type for v in versions] == ["int4", "int2"]


def test_a_replayable_change_that_a_poll_has_seen_has_an_event_at_its_first_row(
    capturing: Capturing,
) -> None:
    """A table with `on_schema_change: stop` stops before this row."""
    capturing.begin("create table t (id int primary key); insert into t values (1)")
    capturing.database.execute("insert into t values (2)")
    capturing.capture()
    capturing.database.execute("alter table t add c int")
    capturing.database.execute("insert into t values (3)")
    (seen,) = poll(capturing)
    capturing.database.execute("insert into t values (4)")
    capturing.capture()
    first, second = capturing.zone.schema_events.read()
    assert second == seen
    row = next(row for row in capturing.rows() if row["new"] and "3" in row["new"])
    assert (first.found_by, first.lsn) == ("stream", row["commit_lsn"])
    assert shown([first]) == shown([second]) == ["t column_added c"]
    assert poll(capturing) == []


@pytest.mark.parametrize("polls", [False, True])
def test_a_definition_that_a_table_had_before_has_an_event_at_its_first_row(
    capturing: Capturing, polls: bool
) -> None:
    """F4. The relation version is known. With `stop`, a table stops before this row."""
    capturing.begin("create table t (id int primary key, a int); insert into t values (1)")
    capturing.database.execute("insert into t values (2)")
    capturing.capture()
    for statement in ("alter table t add c int", "alter table t rename a to b"):
        capturing.database.execute(statement)
    capturing.database.execute("insert into t values (3)")
    capturing.capture()
    events = capturing.zone.schema_events.read()
    assert shown(events) == ["t column_added c", "t column_renamed a,b"]

    for statement in ("alter table t drop c", "alter table t rename b to a"):
        capturing.database.execute(statement)
    capturing.database.execute("insert into t values (4)")
    window = capturing.window()
    capturing.database.execute("insert into t values (5)")
    # The LSN of a look is behind the window.
    expected = ["t column_dropped c", "t column_renamed b,a"]
    if polls:
        seen = poll(capturing)
        assert shown(seen) == expected
        assert all(event.lsn > window.end for event in seen)
        events += seen
    capturing.capture(window)
    found = [event for event in capturing.zone.schema_events.read() if event not in events]
    assert shown(found) == expected
    row = next(row for row in capturing.rows() if row["new"] and "4" in row["new"])
    assert {(e.found_by, e.lsn) for e in found} == {("stream", row["commit_lsn"])}
    assert [v.version for v in capturing.zone.relations.versions(1)] == [1, 2]
    capturing.capture()
    assert poll(capturing) == []


def test_a_change_that_is_taken_back_within_a_window_has_two_events(capturing: Capturing) -> None:
    """F4: neither look shows the change, and the second version is known."""
    capturing.begin("create table t (id int primary key); insert into t values (1)")
    execute = capturing.database.execute
    execute("insert into t values (2)")
    capturing.capture()
    for alteration, row in (("add c int", 3), ("drop c", 4)):
        execute(f"alter table t {alteration}")
        execute(f"insert into t values ({row})")
    capturing.capture()
    events = capturing.zone.schema_events.read()
    assert [(event.change, event.columns) for event in events] == [
        (SchemaChange.COLUMN_ADDED, ("c",)), (SchemaChange.COLUMN_DROPPED, ("c",)),
    ]  # fmt: skip
    assert [event.lsn for event in events] == [row["commit_lsn"] for row in capturing.rows()[1:]]
    assert poll(capturing) == []


def test_a_look_right_before_a_commit_has_the_definition_from_before_it(
    capturing: Capturing,
) -> None:
    """F4: the commit record may begin at the LSN of the look. The second version is known."""
    capturing.begin("create table t (id int primary key, a int); insert into t values (1)")
    capturing.database.execute("insert into t values (2)")
    capturing.capture()
    capturing.database.execute("alter table t rename a to b")
    with capturing.database.connect(autocommit=False) as conn, conn.cursor() as cursor:
        cursor.execute("alter table t rename b to a; insert into t values (3)")
        assert shown(poll(capturing)) == ["t column_renamed a,b"]
        conn.commit()
    capturing.capture()
    [event] = [e for e in capturing.zone.schema_events.read() if e.columns == ("b", "a")]
    assert (event.found_by, event.lsn) == ("stream", capturing.rows()[-1]["commit_lsn"])
    assert poll(capturing) == []


def test_a_poll_of_another_database_is_refused(capturing: Capturing) -> None:
    """Otherwise the tables of the captured database would count as dropped."""
    capturing.begin("create table t (id int primary key)")
    assert poll(capturing) == []
    other = create_database(capturing.database.server)
    try:
        other.execute("create publication pub for all tables")
        with pytest.raises(RawZoneError, match=f"not from slot .* of database {other.name} "):
            poll(replace(capturing, conninfo=other.conninfo))
    finally:
        drop_database(other)
    assert capturing.zone.schema_events.read() == []


def test_a_look_at_a_definition_from_before_its_change_stops_no_earlier_row(
    capturing: Capturing,
) -> None:
    """The capture reads rows from before a change that was taken back since."""
    capturing.begin("create table t (id int primary key, a int); insert into t values (1)")
    capturing.database.execute("insert into t values (2)")
    capturing.capture()
    capturing.database.execute("insert into t values (3)")
    for statement in ("alter table t rename a to b", "alter table t rename b to a"):
        capturing.database.execute(statement)
        poll(capturing)
    capturing.capture()
    assert {event.found_by for event in capturing.zone.schema_events.read()} == {"catalog"}
