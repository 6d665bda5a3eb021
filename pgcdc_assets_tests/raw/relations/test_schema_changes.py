"""The changes between two versions of a relation, and whether the stream can replay them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.raw.relations.schema_changes import compare_relations
from pgcdc_assets.raw.relations.type_changes import changes_text, is_widened

_PLAIN: dict[str, Any] = {"has_default": False, "not_null": False, "generated": "", "identity": ""}


def _column(name: str, attnum: int | None, **values: Any) -> Column:
    defaults: dict[str, Any] = {"type_oid": 23, "attnum": attnum, "base_type": "int4"}
    return Column(name, **defaults | values)


def _relation(*columns: Column, **values: Any) -> Relation:
    defaults: dict[str, Any] = {
        "relation_id": 7,
        "schema": "shop",
        "table": "orders",
        "replica_identity": ReplicaIdentity.DEFAULT,
        "columns": columns,
        "primary_key": ("id",),
        "attribute_count": max(column.attnum or 0 for column in columns),
    }
    return Relation(**defaults | values)


_ID = _column("id", 1, is_key=True)
_A = _column("a", 2)
_BEFORE = _relation(_ID, _A)


def _found(before: Relation, after: Relation, is_rewritten: bool | None = None) -> set[str]:
    """Return the changes as `change columns`, with `!` if a snapshot is needed."""
    return {
        f"{found.change} {','.join(found.columns)}".strip() + "!" * found.needs_snapshot
        for found in compare_relations(before, after, is_rewritten)
    }


_CHANGES = {
    "nothing": (_BEFORE, set()),
    "a nullable column": (_relation(_ID, _A, _column("b", 3, **_PLAIN)), {"column_added b"}),
    "a constant default": (
        _relation(_ID, _A, _column("b", 3, **_PLAIN | {"has_default": True}, missing="5")),
        {"column_added b"},
    ),
    "an expression": (
        _relation(_ID, _A, _column("b", 3, **_PLAIN | {"has_default": True})),
        {"column_added b!"},
    ),
    "not null": (
        _relation(_ID, _A, _column("b", 3, **_PLAIN | {"not_null": True})),
        {"column_added b!"},
    ),
    "generated": (
        _relation(_ID, _A, _column("b", 3, **_PLAIN | {"generated": "s"})),
        {"column_added b!"},
    ),
    "an identity column": (
        _relation(_ID, _A, _column("b", 3, **_PLAIN | {"identity": "a"})),
        {"column_added b!"},
    ),
    "unknown facts": (_relation(_ID, _A, _column("b", 3)), {"column_added b!"}),
    "an unknown column": (_relation(_ID, _A, _column("b", None)), {"column_added b!"}),
    "dropped": (_relation(_ID), {"column_dropped a"}),
    "dropped and added": (
        _relation(_ID, _column("a", 3, **_PLAIN)),
        {"column_dropped a", "column_added a"},
    ),
    "renamed": (_relation(_ID, replace(_A, name="b")), {"column_renamed a,b"}),
    "renamed key": (
        _relation(replace(_ID, name="key"), _A, primary_key=("key",)),
        {"column_renamed id,key"},
    ),
    "swapped": (
        _relation(replace(_ID, name="a"), replace(_A, name="id"), primary_key=("a",)),
        {"column_renamed id,a", "column_renamed a,id"},
    ),
    "widened": (
        _relation(_ID, replace(_A, type_oid=20, base_type="int8")),
        {"type_widened a"},
    ),
    "another type": (
        _relation(_ID, replace(_A, type_oid=25, base_type="text")),
        {"type_changed a!"},
    ),
    "another key": (
        _relation(replace(_ID, is_key=False), replace(_A, is_key=True), primary_key=("a",)),
        {"key_changed a!"},
    ),
    "a key of one more column": (
        _relation(_ID, replace(_A, is_key=True), primary_key=("a", "id")),
        {"key_changed a,id!"},
    ),
    "no key": (_relation(replace(_ID, is_key=False), _A, primary_key=()), {"key_changed!"}),
    "the key's column dropped": (
        _relation(_A, primary_key=(), attribute_count=2),
        {"column_dropped id", "key_changed!"},
    ),
    "full identity": (
        _relation(
            _ID, replace(_A, is_key=True), replica_identity=ReplicaIdentity.FULL
        ),
        {"identity_changed"},
    ),
    "no identity": (
        _relation(
            replace(_ID, is_key=False), _A, replica_identity=ReplicaIdentity.NOTHING
        ),
        {"identity_changed"},
    ),
    "another name": (_relation(_ID, _A, schema="sales"), {"table_renamed"}),
}  # fmt: skip


@pytest.mark.parametrize("name", _CHANGES)
def test_each_change_is_found_and_judged(name: str) -> None:
    after, expected = _CHANGES[name]
    assert _found(_BEFORE, after) == expected


_FULL = {"replica_identity": ReplicaIdentity.FULL}
_BY_INDEX = {"replica_identity": ReplicaIdentity.INDEX}
_B = replace(_A, is_key=True)
_UNKEYED = replace(_ID, is_key=False)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(_BEFORE, _relation(_ID, _B, **_FULL), {"identity_changed"}, id="full"),
        pytest.param(_relation(_ID, _B, **_FULL), _BEFORE, {"identity_changed"}, id="default"),
        pytest.param(
            _BEFORE, _relation(_ID, _A, **_BY_INDEX), {"identity_changed"}, id="index of the key"
        ),
        pytest.param(
            _BEFORE,
            _relation(_ID, _A, primary_key=(), **_BY_INDEX),
            {"identity_changed"},
            id="index instead of the key",
        ),
        pytest.param(
            _BEFORE,
            _relation(_ID, _B, **_BY_INDEX),
            {"identity_changed"},
            id="index with more columns than the key",
        ),
        pytest.param(
            _BEFORE,
            _relation(_UNKEYED, _B, **_BY_INDEX),
            {"key_changed a!", "identity_changed"},
            id="index of other columns",
        ),
        pytest.param(
            _relation(_ID, _B, **_FULL),
            _relation(_ID, _B, primary_key=(), **_FULL),
            {"key_changed!"},
            id="no key under full",
        ),
        pytest.param(
            _relation(_UNKEYED, _A, primary_key=()), _BEFORE, {"key_changed id!"}, id="key again"
        ),
        pytest.param(
            _relation(_UNKEYED, _A, replica_identity=ReplicaIdentity.NOTHING),
            _BEFORE,
            {"identity_changed"},
            id="identity again",
        ),
    ],
)
def test_a_snapshot_is_needed_if_other_columns_identify_a_row(
    before: Relation, after: Relation, expected: set[str]
) -> None:
    assert _found(before, after) == expected


def test_a_key_in_another_order_identifies_the_same_rows() -> None:
    both = (_ID, replace(_A, is_key=True))
    before = _relation(*both, primary_key=("id", "a"))
    assert _found(before, _relation(*both, primary_key=("a", "id"))) == {"key_changed a,id"}


def test_only_a_rewritten_table_has_values_in_a_new_column() -> None:
    """The default may have been dropped or changed before the poll of the catalog."""
    plain = _relation(_ID, _A, _column("b", 3, **_PLAIN))
    later = _relation(_ID, _A, _column("b", 3, **_PLAIN | {"has_default": True, "not_null": True}))
    known = _relation(_ID, _A, _column("b", 3, **_PLAIN, missing="5"))
    assert _found(_BEFORE, plain, is_rewritten=True) == {"column_added b!"}
    assert _found(_BEFORE, later, is_rewritten=False) == {"column_added b"}
    assert _found(_BEFORE, known, is_rewritten=True) == {"column_added b"}


def test_a_column_that_is_published_later_is_not_an_added_column() -> None:
    narrow = _relation(_ID, attribute_count=2)
    assert _found(narrow, _relation(_ID, _A)) == {"publication_changed a!"}


def _numeric(precision: int, scale: int) -> int:
    return (precision << 16 | scale & 0x7FF) + 4


def _typed(name: str, typmod: int, oid: int, element: str | None = None) -> Column:
    if element is None:
        return Column("a", oid, typmod, base_type=name, base_typmod=typmod)
    return Column(
        "a", oid, typmod, base_type=name, base_typmod=typmod, element_type=element,
        element_typmod=typmod,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "is_wider"),
    [
        (("int2", -1), ("int4", -1), True),
        (("int4", -1), ("int8", -1), True),
        (("int8", -1), ("int4", -1), False),
        (("float4", -1), ("float8", -1), True),
        (("float8", -1), ("float4", -1), False),
        (("int4", -1), ("float8", -1), False),
        (("varchar", 14), ("varchar", 24), True),
        (("varchar", 24), ("varchar", 14), False),
        (("varchar", 14), ("varchar", -1), True),
        (("varchar", 14), ("text", -1), True),
        (("text", -1), ("varchar", -1), True),
        (("text", -1), ("varchar", 14), False),
        (("bpchar", 7), ("bpchar", 9), False),
        (("bpchar", 7), ("text", -1), False),
        (("numeric", _numeric(10, 2)), ("numeric", _numeric(12, 2)), True),
        (("numeric", _numeric(10, 2)), ("numeric", _numeric(12, 4)), True),
        (("numeric", _numeric(10, 2)), ("numeric", _numeric(12, 5)), False),
        (("numeric", _numeric(10, 2)), ("numeric", _numeric(12, 1)), False),
        (("numeric", _numeric(5, -2)), ("numeric", _numeric(7, 0)), True),
        (("numeric", _numeric(5, -2)), ("numeric", _numeric(6, 0)), False),
        (("numeric", _numeric(10, 2)), ("numeric", -1), True),
        (("numeric", -1), ("numeric", _numeric(10, 2)), False),
        (("int4", -1), ("numeric", _numeric(10, 0)), True),
        (("int4", -1), ("numeric", _numeric(9, 0)), False),
        (("int4", -1), ("numeric", _numeric(12, -1)), False),
        (("int8", -1), ("numeric", -1), True),
        (("timestamp", 0), ("timestamp", 3), True),
        (("timestamptz", 3), ("timestamptz", -1), True),
        (("timestamp", 6), ("timestamp", 3), False),
        (("timestamp", -1), ("timestamptz", -1), False),
        (("time", 0), ("time", 6), True),
        (("date", -1), ("timestamp", 0), True),
        (("date", -1), ("timestamptz", -1), False),
        (("varbit", 3), ("varbit", 5), True),
        (("bit", 3), ("bit", 5), False),
        (("json", -1), ("jsonb", -1), False),
        (("shop.mood", -1), ("shop.mood", -1), False),
        (("shop.mood", -1), ("text", -1), False),
    ],
)  # fmt: skip
def test_a_wider_type_holds_every_value(
    before: tuple[str, int], after: tuple[str, int], is_wider: bool
) -> None:
    """The columns have different type OIDs: domains, and types that were created again."""
    assert is_widened(_typed(*before, 1), _typed(*after, 2)) is is_wider
    if "." not in before[0]:
        arrays = _typed("_x", before[1], 1, before[0]), _typed("_y", after[1], 2, after[0])
        assert is_widened(*arrays) is (is_wider and not changes_text(*arrays))


def test_a_domain_and_its_base_type_hold_the_same_values() -> None:
    assert is_widened(_typed("int4", -1, 16400), _typed("int4", -1, 23))
    assert not is_widened(_typed("int4", -1, 23), _typed("_int4", -1, 1007, "int4"))
    assert not is_widened(Column("a", 16400), _typed("int4", -1, 23))


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (Column("a", 1700, _numeric(10, 2), type="numeric", base_type="numeric"), "numeric(10,2)"),
        (Column("a", 1700, type="numeric", base_type="numeric"), "numeric"),
        (Column("a", 1043, 14, type="character varying", base_type="varchar"),
         "character varying(10)"),
        (Column("a", 1231, _numeric(5, 1), type="numeric[]", element_type="numeric"),
         "numeric(5,1)[]"),
        (Column("a", 1560, 3, type="bit", base_type="bit"), "bit(3)"),
    ],
)  # fmt: skip
def test_a_sentence_has_the_type_with_its_modifier(column: Column, text: str) -> None:
    after = Column("a", 17, attnum=2, type="bytea", base_type="bytea")
    before = replace(column, attnum=2)
    (found,) = compare_relations(_relation(_ID, before), _relation(_ID, after))
    assert found.detail == f"The type of column a was changed from {text} to bytea."
