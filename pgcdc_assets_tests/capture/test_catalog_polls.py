"""Changes that only the catalog shows: types, partitions and gaps of the publication."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

# Statements, and the tables whose stored values have other texts after the statement.
_TYPES: tuple[tuple[str, list[str]], ...] = (
    ("alter type mood add value 'c'", []),
    ("alter type mood rename value 'a' to 'z'", ["array", "deep", "enum"]),
    ("alter type mood rename value 'z' to 'a'", ["array", "deep", "enum"]),
    ("alter type pair add attribute more text", ["composite", "deep"]),
    ("alter type pair drop attribute more", ["composite", "deep"]),
    (
        "alter type mood rename value 'a' to 'x'; alter type mood rename value 'x' to 'a'",
        ["array", "deep", "enum"],
    ),
    (
        "alter type pair add attribute more text; alter type pair drop attribute more",
        ["composite", "deep"],
    ),
    ("alter type pair rename attribute n to number", []),
    ("alter type mood rename to feeling", []),
    ("alter domain amount add check (value > 0); alter domain amount set not null", []),
    ("create type later as enum ('x'); alter type later rename value 'x' to 'y'", []),
)


def test_types_with_other_texts_of_stored_values_are_found(capturing: Capturing) -> None:
    """F10: no row and no column of the table changes."""
    capturing.begin(
        "create type mood as enum ('a', 'b'); create type pair as (n int);"
        "create domain amount as int; create type another as enum ('a', 'b');"
        "create type nested as (p pair, m mood); create domain nesting as nested",
        *(
            f'create table "{name}" (id int primary key, v {kind})'
            for name, kind in {
                "enum": "mood",
                "array": "mood[]",
                "composite": "pair",
                "deep": "nesting[]",
                "domain": "amount",
                "other": "another",
            }.items()
        ),
    )
    assert poll(capturing) == []
    for statement, tables in _TYPES:
        capturing.database.execute(statement)
        found = poll(capturing)
        assert shown(found) == [f"{table} table_rewritten!" for table in tables], statement
        assert poll(capturing) == []
    details = {event.detail for event in capturing.zone.schema_events.read()}
    assert details == {
        "The values of type public.mood have other texts now.",
        "The values of type public.pair have other texts now.",
        "The texts of the values of type public.mood were altered, and altered back.",
        "The texts of the values of type public.pair were altered, and altered back.",
    }


def test_the_row_type_of_another_table_is_a_composite_type(capturing: Capturing) -> None:
    """F10: the publication does not send the table of the type."""
    capturing.begin(
        "create unlogged table item (n int); create domain items as item[];"
        "create table t (id int primary key, v items); create table other (id int primary key)"
    )
    assert poll(capturing) == []
    for statement in ("alter table item add m int", "alter table item drop n"):
        capturing.database.execute(statement)
        assert shown(poll(capturing)) == ["t table_rewritten!"]
    capturing.database.execute("alter table item alter m set default 5")
    assert poll(capturing) == []


def test_a_poll_of_an_earlier_release_lacks_the_texts_of_types(
    capturing: Capturing,
) -> None:
    """F10: the next poll stores the texts, and finds later changes."""
    capturing.begin("create type mood as enum ('a')", "create table t (id int primary key, v mood)")
    assert poll(capturing) == []
    definitions = capturing.zone.definitions
    base = definitions.read(1)
    earlier = {}
    for oid, seen in base.tables.items():
        known = json.loads(seen.text)
        assert known.pop("type_texts")
        earlier[oid] = replace(seen, text=json.dumps(known))
    assert definitions.replace(1, base, "the digest of another query", earlier)
    capturing.database.execute("alter type mood rename value 'a' to 'b'")
    assert poll(capturing) == []
    capturing.database.execute("alter type mood rename value 'b' to 'c'")
    assert shown(poll(capturing)) == ["t table_rewritten!"]


def _begin(capturing: Capturing, publication: str, *statements: str) -> None:
    """Begin with a publication that is not FOR ALL TABLES."""
    capturing.begin(*statements)
    capturing.database.execute(f"drop publication pub; create publication pub {publication}")
    assert poll(capturing) == []


_ROOT = (
    "create table root (id int primary key, a int) partition by range (id);"
    "create table old partition of root for values from (0) to (10);"
    "create table mid partition of root for values from (10) to (20) partition by range (id);"
    "create table leaf partition of mid for values from (10) to (15);"
    "create table single (a int, id int primary key);"
    "create table t (id int primary key)"
)
_VIA_ROOT = "for table root, t with (publish_via_partition_root = true)"


def test_attached_and_detached_partitions_are_found_at_their_root(capturing: Capturing) -> None:
    """E1, E3, E5."""
    _begin(capturing, _VIA_ROOT, _ROOT)
    execute = capturing.database.execute
    execute("insert into root values (1), (11)")
    execute("create table new partition of root for values from (30) to (40)")
    assert shown(poll(capturing)) == ["root partition_attached"]
    execute("insert into single values (1, 25)")
    execute("alter table root attach partition single for values from (20) to (30)")
    assert shown(poll(capturing)) == ["root partition_attached!"]
    execute("alter table root detach partition old; insert into old values (2);"
            "alter table root attach partition old for values from (0) to (10)")  # fmt: skip
    assert shown(poll(capturing)) == ["root partition_attached!"]
    execute("alter table mid detach partition leaf")
    assert shown(poll(capturing)) == ["root partition_detached!"]
    execute("drop table old")
    assert shown(poll(capturing)) == ["root partition_detached!"]
    execute("create table made (id int primary key, a int); insert into made values (1);"
            "alter table root attach partition made for values from (0) to (10)")  # fmt: skip
    assert shown(poll(capturing)) == ["root partition_attached!"]
    execute("alter table root alter a type int using a + 1")
    assert shown(poll(capturing)) == ["root table_rewritten!"]
    execute("vacuum full made")
    assert poll(capturing) == []


def test_leaves_that_are_published_by_name_are_separate_tables(capturing: Capturing) -> None:
    """E3, E5, E6."""
    _begin(capturing, "for table root, t", _ROOT)
    execute = capturing.database.execute
    execute("alter table root detach partition old")
    assert shown(poll(capturing)) == ["old publication_changed"]
    execute("alter table root attach partition old for values from (0) to (10)")
    assert shown(poll(capturing)) == ["old publication_changed!"]
    execute("alter table root detach partition old; insert into old values (3);"
            "alter table root attach partition old for values from (0) to (10)")  # fmt: skip
    assert shown(poll(capturing)) == ["old publication_changed!"]
    execute("alter table root attach partition single for values from (20) to (30)")
    assert poll(capturing) == []
    execute("alter table root rename a to b")
    assert shown(poll(capturing)) == [
        f"{leaf} column_renamed a,b" for leaf in ("leaf", "old", "single")
    ]
    execute("alter publication pub add table old")
    assert poll(capturing) == []
    execute("alter table root detach partition old; insert into old values (4);"
            "alter table root attach partition old for values from (0) to (10)")  # fmt: skip
    assert poll(capturing) == []


@pytest.mark.every_pg(since=15)
def test_a_leaf_has_its_own_column_list_beside_its_published_root(capturing: Capturing) -> None:
    """E6: the list of a leaf that is published by its own name does not come from its root."""
    _begin(capturing, "for table root, leaf (id), t", _ROOT)
    execute = capturing.database.execute
    execute("alter table root add column c float8 default random()")
    assert shown(poll(capturing)) == ["old column_added c!"]
    execute("insert into root (id) values (11), (1)")
    capturing.capture()
    assert shown(capturing.zone.schema_events.read()) == ["old column_added c!"]


@pytest.mark.every_pg(since=15)
def test_a_leaf_that_gets_a_row_filter_beside_its_published_root_needs_a_snapshot(
    capturing: Capturing,
) -> None:
    """D13, E6: rows that do not pass the filter are not sent any more."""
    _begin(capturing, "for table root, t", _ROOT)
    execute = capturing.database.execute
    execute("alter publication pub add table leaf where (id > 15)")
    assert shown(poll(capturing)) == ["leaf publication_changed!"]
    execute("alter publication pub drop table leaf")
    assert shown(poll(capturing)) == ["leaf publication_changed!"]


# Statements and the expected events of tables `t` (row filter), `u` (column list) and `v`.
_PUBLICATION = {
    "left and returned": (
        "alter publication pub drop table v; insert into v values (9);"
        "alter publication pub add table v",
        ["v publication_changed!"],
    ),
    "left": ("alter publication pub drop table v", ["v publication_changed"]),
    "row filter": (
        "alter publication pub set table t where (id > 7), u (id), v", ["t publication_changed!"],
    ),
    "no row filter": (
        "alter publication pub set table t, u (id), v", ["t publication_changed!"],
    ),
    "column list": (
        "alter publication pub set table t where (id > 5), u (id, a), v",
        ["u publication_changed!"],
    ),
    "a new table": ("create table w (id int); alter publication pub add table w", []),
    "publish and back": (
        "alter publication pub set (publish = 'insert');"
        "alter publication pub set (publish = 'insert, update, delete, truncate')",
        [f"{t} publication_changed!" for t in "tuv"],
    ),
    "via root": (
        "alter publication pub set (publish_via_partition_root = true)",
        [f"{t} publication_changed!" for t in "tuv"],
    ),
    "created again": (
        "drop publication pub; create publication pub for table t where (id > 5), u (id), v",
        [f"{t} publication_changed!" for t in "tuv"],
    ),
    "dropped": ("drop publication pub", [f"{t} publication_changed" for t in "tuv"]),
    "comment": ("comment on publication pub is 'x'; analyze t", []),
    "owner": ("alter publication pub owner to {other}", []),
    "owner and publish": (
        "alter publication pub owner to {other}; alter publication pub set (publish = 'insert')",
        [f"{t} publication_changed!" for t in "tuv"],
    ),
    "renamed": (
        "alter publication pub rename to gone", [f"{t} publication_changed" for t in "tuv"],
    ),
    "renamed and back at once": (
        "alter publication pub rename to other; alter publication other rename to pub",
        [f"{t} publication_changed!" for t in "tuv"],
    ),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.every_pg(since=15)
def test_a_gap_of_the_publication_is_found_for_the_tables_concerned(
    capturing: Capturing, role: str
) -> None:
    """C11, B9."""
    definition = "for table t where (id > 5), u (id), v"
    _begin(capturing, definition, *(f"create table {t} (id int primary key, a int)" for t in "tuv"))
    for name, (statements, expected) in _PUBLICATION.items():
        capturing.database.execute(statements.format(other=role))
        assert shown(poll(capturing)) == expected, name
        assert poll(capturing) == [], name
        capturing.database.execute(
            f"drop publication if exists pub; create publication pub {definition}"
        )
        returned = poll(capturing)
        assert {"t publication_changed!", "v publication_changed!"} <= set(shown(returned)), name


def test_a_publication_that_is_renamed_and_gets_its_name_back_has_no_gap(
    capturing: Capturing,
) -> None:
    """The stream fails at each row from the time without the publication (test_publication.py)."""
    _begin(capturing, "for table t", "create table t (id int primary key)")
    execute = capturing.database.execute
    for back in ("", "alter publication pub set (publish = 'insert')"):
        execute("alter publication pub rename to other")
        assert shown(poll(capturing)) == ["t publication_changed"]
        assert poll(capturing) == []
        execute(f"alter publication other rename to pub; {back}")
        assert shown(poll(capturing)) == ["t publication_changed" + "!" * bool(back)]
    execute("drop publication pub")
    assert shown(poll(capturing)) == ["t publication_changed"]
    execute("create publication pub for table t")
    assert shown(poll(capturing)) == ["t publication_changed!"]


@pytest.mark.every_pg(since=15)
def test_a_column_that_leaves_the_list_is_not_a_dropped_column(capturing: Capturing) -> None:
    _begin(capturing, "for table t (id, a)", "create table t (id int primary key, a int, b int)")
    capturing.database.execute("alter table t drop b")
    assert poll(capturing) == []
    capturing.database.execute("alter publication pub set table t (id)")
    assert shown(poll(capturing)) == ["t publication_changed!"]


@pytest.mark.sampled
@pytest.mark.every_pg(since=15)
def test_a_table_that_left_a_published_schema_and_returned_has_a_gap(
    capturing: Capturing, role: str
) -> None:
    """C11, F8."""
    _begin(
        capturing, "for tables in schema public, s", "create schema s; create schema hidden",
        "create table t (id int primary key); create table u (id int primary key)",
    )  # fmt: skip
    execute = capturing.database.execute
    execute("alter table t set schema hidden; insert into hidden.t values (1);"
            "alter table hidden.t set schema public")  # fmt: skip
    assert shown(poll(capturing)) == ["t publication_changed!"]
    execute("alter table u rename to w; grant select on w to public")
    assert shown(poll(capturing)) == ["u table_renamed"]
    execute(f"alter table t owner to {role}")
    assert poll(capturing) == []
    for schema in ("s", "public"):
        execute(f"alter table if exists public.t set schema {schema};"
                f"alter table if exists s.t set schema {schema}")  # fmt: skip
        assert shown(poll(capturing)) == ["t table_renamed"]
    # The schema `hidden` was not published when the table was moved into it.
    execute("alter table t set schema hidden; insert into hidden.t values (2);"
            "alter publication pub add tables in schema hidden")  # fmt: skip
    assert shown(poll(capturing)) == ["t publication_changed!", "t table_renamed"]
    execute("alter table hidden.t set schema public")
    execute("alter publication pub drop tables in schema hidden")
    assert shown(poll(capturing)) == ["t publication_changed!", "t table_renamed"]
    execute("alter publication pub drop tables in schema s")
    assert poll(capturing) == []
    execute("alter publication pub drop tables in schema public")
    assert shown(poll(capturing)) == ["t publication_changed", "u publication_changed"]
    execute("alter publication pub add tables in schema public")
    assert shown(poll(capturing)) == ["t publication_changed!", "u publication_changed!"]


@pytest.mark.sampled
def test_dropped_recreated_and_exchanged_tables_are_found(capturing: Capturing) -> None:
    """F8."""
    capturing.begin("create table t (id int primary key); create table u (id int primary key)")
    execute = capturing.database.execute
    execute("insert into t values (1); insert into u values (1)")
    capturing.capture()
    execute("drop table t")
    assert shown(poll(capturing)) == ["t table_dropped"]
    execute("create table t (id int primary key)")
    assert shown(poll(capturing)) == ["t table_recreated!"]
    execute("drop table u; create table u (id int primary key, a int); insert into u values (1, 1)")
    capturing.capture()
    events = capturing.zone.schema_events.read()[2:]
    assert shown(events) == ["u table_dropped", "u table_recreated!"]
    assert {e.change: e.found_by for e in events} == {
        "table_dropped": "catalog", "table_recreated": "stream",
    }  # fmt: skip
    execute("create table u_new (id int primary key)")
    assert poll(capturing) == []
    execute("alter table u rename to u_old; alter table u_new rename to u")
    assert shown(poll(capturing)) == [
        "u table_recreated!",
        "u_new table_renamed",
        "u_old table_renamed",
    ]
    execute("insert into u values (2); insert into t values (2)")
    capturing.capture()
    assert len(capturing.zone.schema_events.read()) == 7
    assert poll(capturing) == []
