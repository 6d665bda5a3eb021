"""The columns that identify a row, and the announcements that share a version."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity

A, B = Column("a", 23), Column("b", 25)
KEY_A, KEY_B = replace(A, is_key=True), replace(B, is_key=True)


def _relation(identity: str, *columns: Column, primary_key: tuple[str, ...] = ()) -> Relation:
    return Relation(16400, "shop", "orders", ReplicaIdentity(identity), columns, primary_key)


@pytest.mark.parametrize(
    ("relation", "key"),
    [
        # The order is that of the primary key, and not that of the columns.
        (_relation("d", KEY_A, KEY_B, primary_key=("b", "a")), ("b", "a")),
        (_relation("d", KEY_A, B), ("a",)),
        (_relation("i", A, KEY_B), ("b",)),
        # The index of the identity has the primary key and further columns.
        (_relation("i", KEY_A, KEY_B, primary_key=("a",)), ("a",)),
        # Updates and deletes send only a part of the primary key.
        (_relation("i", A, KEY_B, primary_key=("a",)), ("b",)),
        (_relation("i", KEY_A, B, primary_key=("a", "b")), ("a",)),
        # The identity has all columns, which do not identify a row.
        (_relation("f", KEY_A, KEY_B), ()),
        (_relation("f", KEY_A, KEY_B, primary_key=("a",)), ("a",)),
        (_relation("f", A, B, primary_key=("a",)), ("a",)),
        (_relation("n", A, B), ()),
        # There are neither updates nor deletes.
        (_relation("n", A, B, primary_key=("a",)), ("a",)),
    ],
)
def test_the_row_key_has_the_columns_that_updates_and_deletes_send(
    relation: Relation, key: tuple[str, ...]
) -> None:
    assert relation.row_key == key


def test_a_replica_identity_is_named_as_in_alter_table() -> None:
    names = {identity.value: identity.sql for identity in ReplicaIdentity}

    assert names == {"d": "DEFAULT", "n": "NOTHING", "f": "FULL", "i": "USING INDEX"}


def test_facts_that_a_relation_message_lacks_are_unknown() -> None:
    known = Column("a", 23)

    assert known == Column(
        name="a",
        type_oid=23,
        typmod=-1,
        is_key=False,
        attnum=None,
        type=None,
        kind="b",
        base_type=None,
        base_typmod=-1,
        element_type=None,
        element_typmod=-1,
        missing=None,
    )
    facts = (known.has_default, known.not_null, known.generated, known.identity)
    assert facts == (None, None, None, None)
    relation = _relation("d", known)
    assert relation.attribute_count is None
    assert (relation.primary_key, relation.unsent_identity) == ((), ())
    assert relation.is_partitioned is False


def test_facts_that_do_not_change_how_tuples_are_read_make_no_other_version() -> None:
    relation = _relation("d", A, primary_key=("a",))
    described = replace(
        relation,
        columns=(replace(A, has_default=True, not_null=True, generated="s", identity="a"),),
        attribute_count=3,
        is_partitioned=True,
        unsent_identity=("b",),
    )

    assert (described, hash(described)) == (relation, hash(relation))


def test_names_are_schema_and_table() -> None:
    relation = _relation("d", A)

    assert (relation.name.schema, relation.name.table) == ("shop", "orders")
    assert relation.qualified_name == "shop.orders"


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        ([A, B], [A, B], True),
        ([A, B], [A], False),
        ([A], [A, B], False),
        ([A, B], [B, A], False),
        ([A], [replace(A, type_oid=20)], False),
        # A rewrite of the table clears only the stored value of older rows.
        ([replace(B, missing="x")], [B], True),
        ([B], [replace(B, missing="x")], False),
        ([replace(B, missing="x")], [replace(B, missing="x")], True),
        ([replace(B, missing="x")], [replace(B, missing="y")], False),
        ([A, replace(B, missing="x")], [A, B], True),
    ],
)
def test_a_cleared_missing_value_needs_no_new_version(
    ours: list[Column], theirs: list[Column], is_same: bool
) -> None:
    assert _relation("d", *ours).describes(_relation("d", *theirs)) is is_same


def test_another_identity_is_another_version() -> None:
    assert not _relation("d", A).describes(_relation("f", A))


@pytest.mark.parametrize(
    ("columns", "attribute_count", "highest"),
    [
        ((), None, 0),
        ((A, B), None, 0),
        ((replace(A, attnum=3), B, replace(B, attnum=2)), None, 3),
        ((replace(A, attnum=3),), 7, 7),
        ((), 7, 7),
    ],
)
def test_the_highest_attnum_includes_dropped_columns_if_it_is_known(
    columns: tuple[Column, ...], attribute_count: int | None, highest: int
) -> None:
    relation = replace(_relation("d", *columns), attribute_count=attribute_count)
    assert relation.highest_attnum == highest


def test_columns_are_matched_by_attnum_else_by_name() -> None:
    a1, b2 = replace(A, attnum=1), replace(B, attnum=2)
    for old, new, expected in [
        # Renamed columns keep their attnum.
        ([a1, b2], [replace(a1, name="b"), replace(b2, name="a")], {0: 0, 1: 1}),
        ([a1, b2], [b2, a1], {0: 1, 1: 0}),
        # A dropped column and a new column of the same name are two columns.
        ([a1, b2], [replace(a1, attnum=3), b2], {1: 1}),
        # Without attnums in one of the versions, the name decides.
        ([A, B], [b2, replace(A, name="c", attnum=1)], {0: 1}),
        ([a1, b2], [B, A, Column("c", 23)], {0: 1, 1: 0}),
        ([a1], [], {}),
    ]:
        assert _relation("d", *old).match_columns(_relation("d", *new)) == expected


def test_a_relation_is_reduced_to_what_its_message_has() -> None:
    known = replace(
        KEY_A, typmod=7, attnum=3, type="integer", kind="e", base_type="int4", missing="1"
    )
    relation = replace(
        _relation("i", known, replace(B, attnum=4), primary_key=("a",)), attribute_count=9
    )
    reduced = relation.as_announced()
    assert reduced == _relation("i", replace(KEY_A, typmod=7), B)
    assert reduced.primary_key == ()
