"""The schema of a table: columns, keys, names, and refused schemas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pgcdc_assets.errors import MergeConflict, ReplicaIdentityError, SchemaChangeError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.fold.schema import build_schema
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.fold.types import delta_type, full_type
from pgcdc_assets.protocol.relation import Column, Relation
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.tables.source_columns import TableColumn
from pgcdc_assets_tests.support.merge.history import column, relation


def _numeric(precision: int, scale: int) -> int:
    """make_numeric_typmod of Postgres's numeric.c."""
    return (precision << 16 | (scale & 0x7FF)) + 4


def _at(attnum: int, name: str) -> Column:
    return replace(column(name, "int4"), attnum=attnum)


def _versions(*relations: Relation) -> list[RelationVersion]:
    return [RelationVersion(1, i, Lsn(i), r) for i, r in enumerate(relations, 1)]


@pytest.mark.parametrize(
    ("declared", "ddl"),
    [
        (column("c", "int2"), "SMALLINT"),
        (column("c", "int8"), "BIGINT"),
        (column("c", "oid"), "BIGINT"),
        (column("c", "numeric", _numeric(10, 2)), "DECIMAL(10,2)"),
        (column("c", "numeric", _numeric(38, 38)), "DECIMAL(38,38)"),
        (column("c", "numeric", _numeric(5, -2)), "DECIMAL(7,0)"),
        (column("c", "numeric", _numeric(3, 5)), "DECIMAL(5,5)"),
        (column("c", "numeric", _numeric(39, 0)), "STRING"),
        (column("c", "numeric", _numeric(38, -1)), "STRING"),
        (column("c", "numeric", _numeric(10, 39)), "STRING"),
        (column("c", "numeric"), "STRING"),
        (column("c", "timestamptz"), "TIMESTAMP"),
        (column("c", "timestamp", 3), "TIMESTAMP_NTZ"),
        (column("c", "time"), "STRING"),
        (column("c", "interval"), "STRING"),
        (column("c", "money"), "STRING"),
        (column("c", "bytea"), "BINARY"),
        (column("c", "uuid"), "STRING"),
        (column("c", "shop.status", kind="e"), "STRING"),
        (column("c", "shop.int4", kind="c"), "STRING"),
        (replace(column("c"), type=None, base_type=None), "STRING"),
        (column("c", "_int4", element_type="int4"), "ARRAY<INT>"),
        (
            column("c", "_numeric", element_type="numeric", element_typmod=_numeric(6, 1)),
            "ARRAY<DECIMAL(6,1)>",
        ),
        (column("c", "_status", kind="e", element_type="shop.status"), "ARRAY<STRING>"),
        (column("c", "_box", element_type="box"), "STRING"),
        (column("c", "public._geometry", element_type="public.geometry"), "STRING"),
    ],
)
def test_each_postgres_type_has_its_delta_type(declared: Column, ddl: str) -> None:
    """G1, G9: by base type and its typmod."""
    assert delta_type(declared).ddl == ddl


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("id", "Name", "name"), '"name" and column "Name"'),
        (("id", "STRASSE", "strasse"), '"strasse"'),
        (("id", "_lsn"), '"_lsn"'),
        (("id", "_Rescued"), '"_Rescued"'),
    ],
)
def test_names_that_delta_cannot_distinguish_are_refused(
    names: tuple[str, ...], shown: str
) -> None:
    with pytest.raises(MergeConflict, match=shown):
        build_schema(_versions(relation(*map(column, names))), None)


def test_the_key_is_the_setting_then_the_primary_key_then_the_identity() -> None:
    columns = [column("a"), column("b"), column("c")]
    made = relation(*columns, key=("c", "a"))
    assert build_schema(_versions(made), None).key == (2, 0)
    full = relation(*columns, key=("c", "a"), identity="f")
    assert build_schema(_versions(full), ("b",)).key == (1,)
    indexed = relation(
        column("a"), column("b", is_key=True), column("c", is_key=True), key=(), identity="i"
    )
    assert build_schema(_versions(indexed), None).key == (1, 2)


@pytest.mark.parametrize("identity", ["d", "n", "f"])
def test_a_table_without_identifying_columns_has_no_key(identity: str) -> None:
    assert build_schema(_versions(relation(column("a"), key=(), identity=identity)), None).key == ()


def test_a_key_that_old_tuples_lack_is_refused() -> None:
    made = relation(column("a"), column("b"), key=("a",))
    with pytest.raises(ReplicaIdentityError, match='"b"'):
        build_schema(_versions(made), ("b",))
    with pytest.raises(MergeConflict, match='"missing"'):
        build_schema(_versions(made), ("missing",))


def test_an_added_column_is_not_in_older_tuples() -> None:
    before = relation(column("id"), column("v", "text"))
    after = relation(column("id"), column("v", "text"), column("w", "text"))
    schema = build_schema(_versions(before, after), None)
    assert [layout.positions for layout in schema.layouts] == [(0, 1, None), (0, 1, 2)]


def _change_of(**change: Any) -> tuple[Relation, Relation]:
    before = relation(column("id"), column("v", "text"))
    id_column, v = before.columns
    return before, replace(before, columns=(id_column, replace(v, **change)))


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        (_change_of(base_type="int4", type="integer"), "its type changed"),
        (_change_of(name="w", attnum=None), "renamed or dropped"),
        (
            (relation(column("id")), relation(column("id"), relation_id=2000)),
            "created again",
        ),
    ],
)
def test_a_change_of_columns_that_cannot_be_replayed_names_the_table(
    versions: tuple[Relation, Relation], reason: str
) -> None:
    with pytest.raises(SchemaChangeError, match=rf"shop\.items.*{reason}"):
        build_schema(_versions(*versions), None)


@pytest.mark.parametrize(
    ("before", "after", "is_replayed"),
    [
        (("varchar", 9), ("varchar", 14), True),
        (("varchar", 9), ("varchar", -1), True),
        (("varchar", 9), ("varchar", 8), False),
        (("varchar", -1), ("varchar", 9), False),
        (("varchar", 9), ("text", -1), True),
        (("int2", -1), ("int8", -1), True),
        (("int8", -1), ("int4", -1), False),
        (("int4", -1), ("numeric", _numeric(12, 2)), True),
        (("int4", -1), ("numeric", _numeric(11, 2)), False),
        (("numeric", _numeric(4, 1)), ("numeric", _numeric(8, 3)), True),
        (("numeric", _numeric(4, 1)), ("numeric", _numeric(5, 3)), False),
        (("float4", -1), ("float8", -1), True),
        (("date", -1), ("timestamp", 0), True),
        (("date", -1), ("timestamptz", -1), False),
        (("bpchar", 9), ("bpchar", 14), False),
        (("timestamp", 0), ("timestamp", 3), True),
        (("timestamptz", 6), ("timestamptz", 0), False),
        (("numeric", _numeric(50, 20)), ("numeric", _numeric(60, 20)), True),
        (("numeric", _numeric(50, 20)), ("numeric", _numeric(60, 21)), False),
        (("numeric", _numeric(50, 20)), ("numeric", -1), True),
        (("numeric", -1), ("numeric", _numeric(50, 20)), False),
    ],
)
def test_a_limit_may_be_widened_but_not_narrowed(
    before: tuple[str, int], after: tuple[str, int], is_replayed: bool
) -> None:
    """F5: if Postgres keeps every value unchanged, no new snapshot is necessary."""
    versions = [relation(column("id"), column("v", *declared)) for declared in (before, after)]
    if is_replayed:
        build_schema(_versions(*versions), None)
        return
    with pytest.raises(SchemaChangeError, match="its type changed from"):
        build_schema(_versions(*versions), None)
    # A snapshot has the values.
    build_schema(_versions(*versions), None, steps=())


def test_a_type_with_another_name_is_the_same_type() -> None:
    """F10: ALTER TYPE ... RENAME TO and SET SCHEMA keep its OID."""
    kinds = (("shop.mood", 20000), ("moods.feeling", 20000), ("moods.feeling", 30000))
    old, new, other = (
        relation(column("id"), column("v", name, type_oid=oid, kind="e")) for name, oid in kinds
    )
    build_schema(_versions(old, new), None)
    with pytest.raises(SchemaChangeError, match="its type changed from"):
        build_schema(_versions(old, other), None)


def test_another_key_than_that_of_the_table_is_refused() -> None:
    made = relation(column("id"), column("v"))
    with pytest.raises(SchemaChangeError, match="key"):
        build_schema(_versions(made), None, known_key='"v"')
    assert build_schema(_versions(made), None, known_key='"id"').key == (0,)


def test_the_columns_of_a_key_may_be_renamed_and_reordered() -> None:
    before = relation(column("a"), column("b"), column("v"), key=("a", "b"))
    after = replace(before, columns=_renamed(before, b="c"), primary_key=("c", "a"))
    schema = build_schema(_versions(before, after), None, known_key='"a", "b"')
    assert schema.key_names == ("c", "a")
    configured = build_schema(
        versions := _versions(before, after), ("a", "b"), known_key='"a", "b"', known=versions[:1]
    )
    assert configured.key_names == ("a", "c")
    other = replace(after, columns=tuple(replace(c, is_key=True) for c in after.columns))
    with pytest.raises(SchemaChangeError, match="key"):
        build_schema(
            _versions(before, replace(other, primary_key=("a", "v"))), None, known_key='"a", "b"'
        )


def _renamed(before: Relation, **names: str) -> tuple[Column, ...]:
    return tuple(replace(c, name=names.get(c.name, c.name)) for c in before.columns)


def _schema_of_past(*relations: Relation, past: tuple[TableColumn, ...] = ()) -> TableSchema:
    versions = _versions(*relations)
    return build_schema(versions, None, known=versions, past=past)


def test_a_history_keeps_a_dropped_column_under_a_unique_name() -> None:
    before = relation(column("id"), column("v", "text"), column("w", "date"))
    id_column, v, w = before.columns
    dropped = replace(before, columns=(id_column, w))
    (*_, field) = _schema_of_past(before, dropped).fields
    assert (field.name, field.is_retained, field.type.ddl) == ("v", True, "STRING")
    assert [x.positions for x in _schema_of_past(before, dropped).layouts] == [
        (0, 2, 1),
        (0, 1, None),
    ]
    assert build_schema(_versions(before, dropped), None).retained == ()

    # Another column has or had the name. Live merges and a rebuild choose the same name.
    again = replace(dropped, columns=(id_column, w, replace(_at(4, "v"), name="v")))
    later = replace(dropped, columns=(id_column, w, _at(4, "u")))
    stored = TableColumn("v", "string", "text", "1/1000.2", is_dropped=True)
    for schema in (
        _schema_of_past(before, dropped, again),
        _schema_of_past(dropped, again, past=(stored,)),
        _schema_of_past(before, again, later),
        _schema_of_past(again, later, past=(replace(stored, name="v_dropped_2"),)),
    ):
        (field,) = (each for each in schema.fields if each.is_retained)
        assert (field.name, field.source) == ("v_dropped_2", "1/1000.2")
    owners = TableColumn("v_dropped_2", "int", "")
    (field,) = (
        each
        for each in _schema_of_past(before, dropped, again, past=(owners,)).fields
        if each.is_retained
    )
    assert field.name == "v_dropped_2_2"
    # If the catalog no longer has the attnum, the name identifies the column.
    lost = replace(before, columns=(id_column, replace(v, attnum=None), w))
    (field,) = (f for f in _schema_of_past(before, lost, dropped).fields if f.is_retained)
    assert (field.name, field.source) == ("v", "1/1000.2")


@pytest.mark.parametrize(
    ("source", "is_dropped", "present", "retained"),
    [
        # Another column of the relation has the name now.
        ("1/1000.2", False, _at(4, "v"), ["v_dropped_2"]),
        # The catalog no longer has the attnum of the column.
        ("1/1000.2", False, replace(_at(4, "v"), attnum=None), []),
        ("1/1000.2", True, replace(_at(4, "v"), attnum=None), ["v_dropped_2"]),
        # Columns of another epoch and of an earlier table are matched by their names.
        ("0/1000.2", False, _at(4, "v"), []),
        ("1/999.2", False, _at(4, "V"), []),
        ("0/1000.2", False, _at(4, "w"), ["v"]),
        ("0/1000.2", True, _at(4, "v"), ["v_dropped_2"]),
    ],
)
def test_a_column_of_the_table_is_dropped_if_no_column_of_the_source_continues_it(
    source: str, is_dropped: bool, present: Column, retained: list[str]
) -> None:
    past = TableColumn("v", "string", "text", source, is_dropped=is_dropped)
    made = relation(column("id"))
    schema = _schema_of_past(replace(made, columns=(*made.columns, present)), past=(past,))
    assert [field.name for field in schema.fields if field.is_retained] == retained


def test_dropped_columns_of_one_name_have_unique_names() -> None:
    before = relation(column("id"), column("v", "text"))
    dropped = replace(before, columns=before.columns[:1])
    # Two columns of an earlier epoch.
    earlier = TableColumn("v", "string", "text", "0/1000.2", is_dropped=True)
    past = (earlier, replace(earlier, name="v_dropped_2", source="0/1000.5"))
    names = [field.name for field in _schema_of_past(before, dropped, past=past).fields]
    assert names == ["id", "v_dropped_2", "v_dropped_2_dropped_5", "v"]
    # A column without an attnum beside a column of the source.
    lost = replace(earlier, source="1/1000.?v")
    owners = TableColumn("v_dropped", "int", "")
    now = relation(column("id"), _at(4, "v"))
    assert _schema_of_past(now, past=(lost,)).fields[-1].name == "v_dropped"
    assert _schema_of_past(now, past=(lost, owners)).fields[-1].name == "v_dropped_2"
    # The name of a column may have a dot and digits.
    dotted = replace(lost, name="v.5", source="1/1000.?v.5")
    now = relation(column("id"), _at(4, "v.5"))
    assert _schema_of_past(now, past=(dotted,)).fields[-1].name == "v.5_dropped"
    # Another relation had the name.
    others = relation(_at(2, "w"), _at(3, "v"), relation_id=9)
    known = [RelationVersion(1, 0, Lsn(0), others), *_versions(before, dropped)]
    assert build_schema(known[1:], None, known=known, past=()).fields[-1].name == "v"


def test_each_dropped_column_has_its_place_in_older_tuples() -> None:
    before = relation(column("id"), column("v", "text"), column("w", "date"), column("x"))
    id_column, v, w, x = before.columns
    both = replace(before, columns=(id_column, x))
    schema = _schema_of_past(before, both)
    assert [field.name for field in schema.fields] == ["id", "x", "v", "w"]
    assert [layout.positions for layout in schema.layouts] == [(0, 3, 1, 2), (0, 1, None, None)]
    # The catalog no longer has an attnum. A dropped column of the same name is the same one.
    unknown = replace(before, columns=(id_column, w, x, replace(v, attnum=None)))
    schema = _schema_of_past(before, unknown, both)
    assert [field.source for field in schema.fields[2:]] == ["1/1000.2", "1/1000.3"]
    assert [layout.positions for layout in schema.layouts] == [
        (0, 3, 1, 2),
        (0, 2, 3, 1),
        (0, 1, None, None),
    ]
    # No dropped column has the name.
    (*_, field) = _schema_of_past(unknown, replace(both, columns=(id_column, w, x))).fields
    assert (field.name, field.source) == ("v", "1/1000.?v")


@pytest.mark.parametrize(
    ("kind", "name", "typmod", "shown"),
    [
        ("numeric", "numeric", (18 << 16 | 9) + 4, "numeric(18,9)"),
        ("numeric", "numeric", -1, "numeric"),
        ("varchar", "character varying", 14, "character varying(10)"),
        ("timestamptz", "timestamp with time zone", 3, "timestamp(3) with time zone"),
        ("bit", "bit", 8, "bit(8)"),
        ("int4", "integer", -1, "integer"),
    ],
)
def test_a_type_is_shown_with_its_limit(kind: str, name: str, typmod: int, shown: str) -> None:
    column = Column("c", 0, typmod=typmod, type=name, base_type=kind, base_typmod=typmod)
    assert full_type(column) == shown
    array = Column("c", 0, typmod=typmod, type=f"{name}[]", base_type="_x", element_type=kind)
    assert full_type(array) == f"{shown}[]"


def _with_default(relation: Relation, text: str, attribute_count: int | None = None) -> Relation:
    last = replace(relation.columns[-1], missing=text)
    return replace(
        relation, columns=(*relation.columns[:-1], last), attribute_count=attribute_count
    )


@pytest.mark.parametrize(
    ("attribute_count", "default"),
    [
        pytest.param(1, "5", id="added since"),
        pytest.param(None, "5", id="version of an earlier release"),
        pytest.param(2, None, id="there before, and not published"),
    ],
)
def test_rows_that_are_older_than_a_column_have_its_default(
    attribute_count: int | None, default: str | None
) -> None:
    key = replace(column("id", "int4", is_key=True), attnum=1)
    before = replace(relation(key), attribute_count=attribute_count)
    after = _with_default(relation(key, _at(2, "n")), "5", 2)
    versions = _versions(before, after)
    assert build_schema(versions, ("id",), known=versions).fields[1].default == default


def test_a_default_that_the_catalog_no_longer_has_is_known() -> None:
    key = replace(column("id", "int4", is_key=True), attnum=1)
    with_default = _with_default(relation(key, _at(2, "n")), "5")
    later = relation(key, _at(2, "n"), _at(3, "m"))
    versions = _versions(relation(key), with_default, later)
    schema = build_schema([versions[0], versions[2]], ("id",), known=versions)
    assert [field.default for field in schema.fields] == [None, "5", None]
    assert build_schema(versions[:1], ("id",)).fields[0].default is None
