"""The column list of a publication, and rewrites of a table or its partitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pgcdc_assets.protocol.relation import Relation, ReplicaIdentity
from pgcdc_assets.protocol.table_definition import (
    Membership,
    Partition,
    RowVersion,
    TableDefinition,
)

_LISTED: dict[str, Any] = {"puballtables": False}
_ALL: dict[str, Any] = {"puballtables": True}


@pytest.mark.parametrize(
    ("publication", "lists", "schemas", "expected"),
    [
        (_LISTED, {1: ["a", "b"]}, (), {"a", "b"}),
        # An ancestor has another list, or none.
        (_LISTED, {2: ["b", "c"], 1: ["a"]}, (), {"a"}),
        (_LISTED, {2: None, 1: ["a"]}, (), {"a"}),
        (_LISTED, {2: ["b"], 1: None}, (), None),
        (_LISTED, {2: ["b"]}, (), None),
        (_LISTED, {}, (), None),
        (_LISTED, {1: ["a"]}, ({"oid": 1},), None),
        (_ALL, {1: ["a"]}, (), None),
        (None, {1: ["a"]}, (), None),
    ],
)
def test_the_column_list_is_that_of_the_table_s_own_row(
    publication: Any, lists: dict[int, Any], schemas: Any, expected: set[str] | None
) -> None:
    rows = tuple({"prrelid": str(oid), "columns": each} for oid, each in lists.items())
    membership = Membership(publication, rows, schemas, (), ())
    assert membership.column_list(1) == expected


def _definition(relfilenode: int, partitions: Mapping[int, Partition]) -> TableDefinition:
    """Return the definition of a table without columns."""
    return TableDefinition(
        relation=Relation(1, "s", "t", ReplicaIdentity.DEFAULT, ()),
        is_published=True,
        membership=Membership(None, (), (), (), ()),
        attnums=frozenset(),
        column_versions={},
        default_versions={},
        class_version=RowVersion(1, 0),
        type_version=1,
        relfilenode=relfilenode,
        toast=0,
        owner=10,
        partitions=partitions,
        type_texts={},
        comments={},
    )


def test_a_new_file_of_the_table_or_of_a_common_partition_is_a_rewrite() -> None:
    one, two = Partition("s.one", 1, False, 11), Partition("s.two", 1, False, 12)
    old = _definition(10, {1: one, 2: two})
    for changes, is_rewritten in (
        ({}, False),
        ({"relfilenode": 13}, True),
        ({"partitions": {1: one, 2: replace(two, relfilenode=13)}}, True),
        # An attached or detached partition is not a rewrite.
        ({"partitions": {1: one, 3: replace(two, relfilenode=13)}}, False),
        ({"partitions": {}}, False),
        ({"partitions": {1: replace(one, name="s.other", xmin=2)}}, False),
    ):
        assert replace(old, **changes).is_rewritten_since(old) is is_rewritten


def test_attached_and_detached_partitions_have_moved() -> None:
    """ATTACH PARTITION writes a row of pg_inherits, so its version differs."""
    one, two, three = (Partition(f"s.p{i}", 1, False, i) for i in range(3))
    old = _definition(0, {1: one, 2: two})
    for partitions, moved in (
        ({1: one, 2: two}, set()),
        ({1: one}, {2}),
        ({1: one, 2: two, 3: three}, {3}),
        ({3: three}, {1, 2, 3}),
        # Detached and attached again between the two looks, and renamed.
        ({1: replace(one, xmin=2), 2: replace(two, name="s.other")}, {1}),
    ):
        assert old.moved_partitions(replace(old, partitions=partitions)) == moved
