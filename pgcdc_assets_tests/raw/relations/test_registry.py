"""Stored relation versions, also in tables of an early release."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw import schema
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.raw.relations.registry import RelationRegistry
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw.rows import relation

_FACTS: dict[str, Any] = {"has_default": True, "not_null": True, "generated": "s", "identity": "a"}
_NEW = {"missing", "attribute_count", *_FACTS}


def _with_missing(text: str | None) -> Relation:
    one = relation("orders", 1)
    columns = (one.columns[0], replace(one.columns[1], missing=text))
    return replace(one, columns=columns, attribute_count=2)


def test_a_table_of_an_earlier_release_is_read_and_gets_new_columns(zone: RawZone) -> None:
    table = zone.relations.table
    old_schema = pa.schema([field for field in schema.RELATIONS if field.name not in _NEW])
    old = RelationRegistry(RawTable(table.lake, table.uri, old_schema, zone.name), zone.name)
    old.register(1, relation("orders", 1), Lsn(10))
    old.flush()

    (version,) = zone.relations.versions(1)
    assert version.relation == relation("orders", 1)
    assert version.relation.attribute_count is None
    assert zone.relations.register(1, relation("orders", 1), Lsn(15)) == 1
    assert zone.relations.register(1, _with_missing("5"), Lsn(20)) == 2
    zone.relations.flush()

    later = RawZone(zone.lake, zone.name).relations
    assert [v.relation for v in later.versions(1)] == [relation("orders", 1), _with_missing("5")]
    assert later.versions(1)[1].relation.attribute_count == 2


def test_facts_that_change_no_tuple_are_stored_without_a_new_version(zone: RawZone) -> None:
    """SET NOT NULL, SET DEFAULT and DROP EXPRESSION write a relation's columns as before."""
    plain = relation("orders", 1)
    first, second = plain.columns
    assert zone.relations.register(1, replace(plain, columns=(first,)), Lsn(10)) == 1
    with_facts = replace(plain, columns=(first, replace(second, **_FACTS)))
    assert zone.relations.register(1, with_facts, Lsn(20)) == 2
    assert zone.relations.register(1, plain, Lsn(30)) == 2
    zone.relations.flush()
    stored = RawZone(zone.lake, zone.name).relations.versions(1)[1].relation.columns
    assert {name: getattr(stored[1], name) for name in _FACTS} == _FACTS
    assert [getattr(stored[0], name) for name in _FACTS] == [None] * 4


def test_a_rewritten_table_keeps_its_version(zone: RawZone) -> None:
    """VACUUM FULL clears attmissingval."""
    assert zone.relations.register(1, _with_missing("5"), Lsn(10)) == 1
    assert zone.relations.register(1, _with_missing(None), Lsn(20)) == 1
    assert zone.relations.register(1, _with_missing("6"), Lsn(30)) == 2


def test_an_entry_that_another_program_has_added_is_named_until_it_is_deleted(
    zone: RawZone,
) -> None:
    zone.relations.register(1, relation("orders", 1), Lsn(10))
    zone.relations.flush()
    uri = zone.relations.table.uri
    (row,) = DeltaTable(uri).to_pyarrow_table().to_pylist()
    other = pa.Table.from_pylist([{**row, "table": "items"}], schema=schema.RELATIONS)
    write_deltalake(uri, other, mode="append")
    condition = f"epoch = 1 AND relation_id = {row['relation_id']} AND relation_version = 1"
    for epoch in (1, 2):
        with pytest.raises(RawZoneError) as caught:
            RawZone(zone.lake, zone.name).relations.versions(epoch)
        assert condition in str(caught.value)
    DeltaTable(uri).delete(f"{condition} AND \"table\" = 'items'")
    (version,) = RawZone(zone.lake, zone.name).relations.versions(1)
    assert version.relation == relation("orders", 1)
