"""The list of tables of a capture that follows its publication."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.table_list import (
    ListedState,
    ListedTable,
    PublishedRelation,
    TableList,
    plan_table_list,
)
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.selection import TableSelection
from pgcdc_assets.table_name import TableName

A, B, C = (TableName("public", name) for name in "abc")


def plan(
    before: Mapping[TableName, int],
    published: Mapping[TableName, int | str],
    *,
    captured: Collection[TableName] = (),
    exclude: tuple[str, ...] = (),
) -> dict[TableName, tuple[int, str]]:
    """Plan a list from OIDs by name; a text in place of an OID refuses the table."""
    planned = plan_table_list(
        [ListedTable(name, oid) for name, oid in before.items()],
        [
            PublishedRelation(name, oid)
            if isinstance(oid, int)
            else PublishedRelation(name, 9, oid)
            for name, oid in published.items()
        ],
        selects=TableSelection(exclude=exclude).selects,
        publication="pub",
        captured=captured,
        relation_ids={name: oid for name, oid in before.items() if name in captured},
    )
    return {table.name: (table.relation_id, table.state.value) for table in planned}


def test_new_tables_are_followed_or_refused() -> None:
    planned = plan({A: 1}, {A: 1, B: 2, C: "It has no identity."}, captured=[A])
    assert planned == {A: (1, "followed"), B: (2, "followed"), C: (9, "refused")}


def test_a_captured_table_is_not_refused() -> None:
    assert plan({A: 1}, {A: "It has no identity."}, captured=[A]) == {A: (9, "followed")}


def test_a_captured_table_that_left_is_listed_until_it_is_excluded() -> None:
    assert plan({A: 1, B: 2}, {B: 2}, captured=[A, B]) == {A: (1, "left"), B: (2, "followed")}
    assert plan({A: 1, B: 2}, {B: 2}, captured=[A, B], exclude=("*.a",)) == {B: (2, "followed")}
    assert plan({A: 1, B: 2}, {A: 1, B: 2}, exclude=("*.a",)) == {B: (2, "followed")}


def test_a_table_that_left_before_its_snapshot_is_not_listed() -> None:
    assert plan({A: 1, B: 2}, {B: 2}, captured=[B]) == {B: (2, "followed")}


def test_a_renamed_table_keeps_its_declared_name() -> None:
    assert plan({A: 1}, {B: 1}, captured=[A]) == {A: (1, "followed")}
    # The new name is excluded, but the declared name is not.
    assert plan({A: 1}, {B: 1}, captured=[A], exclude=("*.b",)) == {A: (1, "followed")}
    # A table without a snapshot is a new table.
    assert plan({A: 1}, {B: 1}) == {B: (1, "followed")}


def test_another_table_may_take_the_name_of_a_renamed_table() -> None:
    planned = plan({A: 1}, {A: 2, B: 1}, captured=[A])
    assert planned == {A: (2, "followed"), B: (1, "followed")}


def test_two_tables_with_exchanged_names_remain_two_tables() -> None:
    planned = plan({A: 1, B: 2}, {A: 2, B: 1}, captured=[A, B])
    assert planned == {A: (2, "followed"), B: (1, "followed")}


def test_one_of_two_processes_stores_its_list(lake: Lake) -> None:
    store = RawZone(lake, "t").table_list
    first = store.read()
    assert first == TableList()
    assert store.replace(first, "1", [])
    assert store.replace(first, "1", [ListedTable(A, 1)])
    # The other process read no list either.
    assert not store.replace(first, "2", [ListedTable(B, 2)])
    base, same = store.read(), store.read()
    left = ListedTable(A, 1, ListedState.LEFT, "It left.")
    odd = ListedTable(TableName('x."y', "/ "), 3, ListedState.REFUSED, "No.")
    assert store.replace(base, "3", [left, odd])
    assert not store.replace(same, "4", [])
    found = store.read()
    assert (found.digest, found.tables, found.declared) == ("3", (left, odd), [A])
    assert store.replace(found, "5", [])
    assert store.read().tables == ()


def test_an_empty_list_is_stored_once(lake: Lake) -> None:
    """The capture looks at the catalog each minute."""
    store = RawZone(lake, "t").table_list
    assert store.replace(store.read(), "1", [ListedTable(A, 1)])
    for _ in range(3):
        assert store.replace(store.read(), "2", [])
    found = store.read()
    assert found.loaded is not None
    assert found.loaded.version() == 2
    assert store.replace(found, "3", [ListedTable(A, 1)])
    assert store.read().declared == [A]
