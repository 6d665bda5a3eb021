"""A declared table is identified by the OID of its newest snapshot (F8)."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.tuples import TEXTS_TYPE
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.relations.schema_events import SchemaChange, SchemaEvent
from pgcdc_assets.raw.relations.source_relations import SourceRelations, find_snapshot_version
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.raw.rows import relation

A, B, C = (TableName("shop", name) for name in "abc")


def _version(number: int, lsn: int, table: str, relation_id: int) -> RelationVersion:
    return RelationVersion(1, number, Lsn(lsn), relation(table, relation_id))


def _snapshot(lsn: int, table: str, version: int, relation_id: int | None) -> Snapshot:
    return Snapshot(1, Lsn(lsn), "shop", table, version, 0, relation_id)


VERSIONS = [
    _version(1, 10, "a", 1),
    _version(1, 10, "b", 2),
    # The names are exchanged at 100, and later exchanged back with the earlier versions.
    _version(2, 100, "b", 1),
    _version(2, 100, "a", 2),
    _version(3, 300, "c", 1),
]


def test_the_newest_snapshot_determines_the_oid_under_any_name() -> None:
    snapshots = [_snapshot(10, "a", 1, 1), _snapshot(10, "b", 1, 2)]
    before = SourceRelations(1, snapshots, VERSIONS)
    assert before.newest_ids([A, B, C]) == {A: 1, B: 2}
    assert before.names(A) == {A, B, C}
    assert before.names(C) == {C}
    assert before.names(C, [2]) == {A, B, C}
    later = [*snapshots, _snapshot(150, "a", 2, 2), _snapshot(200, "b", 1, 2)]
    after = SourceRelations(1, later, VERSIONS)
    assert after.newest_ids([A, B]) == {A: 2, B: 2}
    assert after.relation_ids(A) == {1, 2}
    assert [v.version for v in after.versions(1)] == [1, 2, 3]
    assert after.snapshot_name(B, 2, Lsn(250)) == B
    assert after.snapshot_name(A, 2, Lsn(149)) is None
    assert SourceRelations(2, later, VERSIONS).newest_ids([A]) == {}


def test_a_table_that_was_created_again_is_followed_until_the_next_snapshot() -> None:
    def created_again(lsn: int, relation_id: int, epoch: int = 1) -> SchemaEvent:
        change = SchemaChange.TABLE_RECREATED
        return SchemaEvent(epoch, Lsn(lsn), A, relation_id, change, (), "", True, "catalog")

    events = [created_again(120, 8), created_again(110, 7), created_again(130, 9, epoch=2)]
    relations = SourceRelations(1, [_snapshot(10, "a", 1, 1), _snapshot(10, "b", 1, 2)], VERSIONS)
    assert relations.followed_ids([A, B, C], events) == {A: 8, B: 2}
    assert relations.followed_ids([B], events) == {B: 2}
    healed = SourceRelations(1, [_snapshot(10, "a", 1, 1), _snapshot(120, "a", 2, 2)], VERSIONS)
    assert healed.followed_ids([A], events) == {A: 2}


def test_a_name_belongs_to_another_relation_after_its_announcement() -> None:
    relations = SourceRelations(1, [], VERSIONS)
    assert relations.was_of_another(B, 1, Lsn(100))
    assert not relations.was_of_another(B, 2, Lsn(99))
    assert not relations.was_of_another(C, 1, Lsn(400))
    assert not relations.was_of_another(C, 2, Lsn(299))
    assert relations.was_of_another(C, 2, Lsn(300))


def test_a_snapshot_of_an_early_release_is_described_by_its_name_and_the_newest_version() -> None:
    early = replace(_snapshot(150, "a", 2, None))
    found = find_snapshot_version(early, VERSIONS)
    assert found is not None
    assert found.relation.relation_id == 2
    assert find_snapshot_version(_snapshot(150, "a", 1, 2), VERSIONS) == VERSIONS[1]
    assert find_snapshot_version(_snapshot(150, "a", 3, 2), VERSIONS) is None


def test_a_stored_snapshot_without_rows_has_the_declared_name_and_the_oid(
    zone: RawZone,
) -> None:
    schema = pa.schema([pa.field("new", TEXTS_TYPE)])
    batch = pa.RecordBatch.from_pylist([{"new": ["1", "x"]}], schema=schema)
    zone.snapshots.table.load_or_create()
    for lsn, batches in ((50, [batch]), (60, [])):
        renamed = relation("c", 1)
        version = zone.relations.register(1, renamed, Lsn(lsn))
        landing = zone.snapshots.begin_snapshot(1, Lsn(lsn), renamed, version, name=A)
        if batches:
            landing.write(batches)
        landing.commit()
    zone.relations.flush()
    found = RawZone(zone.lake, zone.name).snapshots.complete_snapshots(1)
    assert [(s.name, s.row_count, s.relation_id) for s in found] == [(A, 1, 1), (A, 0, 1)]
    described = zone.source_relations(1)
    assert described.newest_relation(A) == relation("c", 1)
    assert described.names(A) == {A, C}
