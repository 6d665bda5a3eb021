"""The columns that only an SCD table or only its source has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from deltalake import DeltaTable

from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.columns import SOFT_DELETE_COLUMNS, normalize_name
from pgcdc_assets.tables.owned_columns import find_owned, versions_of_table
from pgcdc_assets.tables.properties import COLUMNS
from pgcdc_assets.tables.source_columns import retained_columns


def find_ignored(zone: RawZone, name: TableName, log: DeltaTable) -> frozenset[str]:
    """Find the columns that the source has dropped and the table has kept, and the owner's.

    Args:
        log: a version of the table.
    """
    return retained_columns(log.metadata().configuration) | find_owned_names(zone, name, log)


def find_owned_names(zone: RawZone, name: TableName, log: DeltaTable) -> frozenset[str]:
    """Find the columns that the table's owner has added (decision 14)."""
    properties, schema = log.metadata().configuration, log.schema().to_json()
    noted = {normalize_name(column) for column in json.loads(properties.get(COLUMNS, "{}"))}
    fields = find_owned(schema, properties, ()).fields
    names = [f["name"] for f in fields if normalize_name(f["name"]) not in noted]
    if not names:
        return frozenset()
    # Only a table of an earlier release has columns of the source without their identities.
    of_source = {
        normalize_name(column.name)
        for version in _versions(zone, name)
        for column in version.relation.columns
    }
    return frozenset(column for column in names if normalize_name(column) not in of_source)


def find_lacking(
    relation: Relation, target: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the columns that only the source has, and that only the target has."""
    source = [column.name for column in relation.columns]
    theirs = set(target)
    ours = {*source, *(name for name, _, _ in SOFT_DELETE_COLUMNS)}
    source_only = tuple(name for name in source if name not in theirs)
    return source_only, tuple(name for name in target if name not in ours)


def _versions(zone: RawZone, name: TableName) -> Iterator[RelationVersion]:
    """Yield the relation versions of a table, which may have had another name."""
    yield from versions_of_table(zone, *name)
    for epoch in zone.epochs.all():
        ids = zone.source_relations(epoch.epoch).relation_ids(name)
        for version in zone.relations.versions(epoch.epoch):
            if version.relation.relation_id in ids:
                yield version
