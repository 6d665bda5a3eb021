"""How the schema of an SCD table is built from relation versions.

A tuple is an array of texts in the order of its own relation version. The newest version of a range
defines the columns. Columns are matched by attnum, so every older version gives each column's
position in its tuples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pgcdc_assets.errors import MergeConflict, ReplicaIdentityError, SchemaChangeError
from pgcdc_assets.merge.fold.table_schema import Field, Layout, TableSchema
from pgcdc_assets.merge.fold.types import delta_type, full_type, keeps_values
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.raw.added_columns import find_added_default
from pgcdc_assets.raw.relations import RelationVersion
from pgcdc_assets.tables.columns import (
    SCD1_COLUMNS,
    UNKNOWN_TYPE,
    SystemColumns,
    check_names,
)
from pgcdc_assets.tables.properties import key_text

# Identities whose old tuples hold the columns of an index, and nothing else.
_KEYED = frozenset({ReplicaIdentity.DEFAULT, ReplicaIdentity.INDEX})


def build_schema(
    versions: Sequence[RelationVersion],
    key: tuple[str, ...] | None,
    known_key: str | None = None,
    system: SystemColumns = SCD1_COLUMNS,
    known: Sequence[RelationVersion] = (),
) -> TableSchema:
    """Build the schema that holds the tuples of all the versions.

    Args:
        versions: of one table, ascending; the last version defines the columns.
        known: all versions of the table in the epoch, with the defaults of added columns.
        key: the configured key; None without one.
        known_key: the key of the existing table, as `key_text` writes it.

    Raises:
        SchemaChangeError: an older version cannot be read as the newest one.
        MergeConflict: two names collide, or a column of the key is not published.
        ReplicaIdentityError: the replica identity does not contain the key.
    """
    newest = versions[-1].relation
    check_names(newest, system)
    fields = tuple(_field(column, newest, known) for column in newest.columns)
    names = key or newest.row_key
    if known_key is not None and known_key != key_text(names):
        raise SchemaChangeError(
            relation=newest.qualified_name,
            column=", ".join(names),
            reason="the key of the table changed",
        )
    for version in versions:
        _check_identity(version.relation, names)
    order = [column.name for column in newest.columns]
    return TableSchema(
        relation=newest,
        version=versions[-1].version,
        fields=fields,
        key=tuple(order.index(name) for name in names),
        layouts=tuple(_layout(version, newest) for version in versions),
        system=system,
        nullable_key=tuple(
            order.index(name)
            for name in names
            if newest.has_full_identity and name not in newest.primary_key
        ),
    )


def _field(column: Column, relation: Relation, known: Sequence[RelationVersion]) -> Field:
    comment = column.type or UNKNOWN_TYPE
    default = find_added_default(column, relation, known)
    text = None if default is None else default.text
    return Field(column.name, delta_type(column), comment, text)


def _check_identity(relation: Relation, key: Sequence[str]) -> None:
    """Check that the old tuples of updates and deletes contain the key."""
    order = {column.name: column for column in relation.columns}
    for name in key:
        column = order.get(name)
        if column is None:
            raise MergeConflict(
                table=relation.qualified_name,
                reason=f'its key column "{name}" is not among its published columns',
            )
        if relation.replica_identity in _KEYED and not column.is_key:
            raise ReplicaIdentityError(
                relation=relation.qualified_name,
                identity=relation.replica_identity.sql,
                reason=f'it does not contain key column "{name}", so a delete does not identify '
                "its row",
                remedy="ALTER TABLE ... REPLICA IDENTITY DEFAULT (or FULL); then pgcdc resnapshot",
            )


def _layout(version: RelationVersion, newest: Relation) -> Layout:
    relation = version.relation
    positions = _positions(relation, newest)
    return Layout(version.version, positions, relation.has_full_identity)


def _positions(older: Relation, newest: Relation) -> tuple[int | None, ...]:
    if older.relation_id != newest.relation_id:
        raise SchemaChangeError(
            relation=newest.qualified_name,
            column="(all)",
            reason="the table was dropped and created again",
        )
    found = dict(_match(older, newest))
    left = [c.name for i, c in enumerate(older.columns) if i not in found.values()]
    if left:
        raise SchemaChangeError(
            relation=newest.qualified_name,
            column=", ".join(left),
            reason="it was dropped or is not published any more",
        )
    for index, position in found.items():
        _check_same(newest, older.columns[position], newest.columns[index])
    return tuple(found.get(index) for index in range(len(newest.columns)))


def _match(older: Relation, newest: Relation) -> Mapping[int, int]:
    by_attnum = {c.attnum: i for i, c in enumerate(older.columns) if c.attnum is not None}
    by_name = {c.name: i for i, c in enumerate(older.columns)}
    found = {}
    for index, column in enumerate(newest.columns):
        position = by_attnum.get(column.attnum) if column.attnum is not None else None
        if position is None:
            position = by_name.get(column.name)
            if position is not None and column.attnum is not None:
                known = older.columns[position].attnum
                # The same name with another attnum is another column.
                position = position if known is None else None
        if position is not None:
            found[index] = position
    return found


def _check_same(newest: Relation, older: Column, newer: Column) -> None:
    if older.name != newer.name:
        reason = f'it was renamed to "{newer.name}"'
    elif delta_type(older).ddl != delta_type(newer).ddl or older.base_type != newer.base_type:
        reason = f"its type changed from {full_type(older)} to {full_type(newer)}"
    elif not keeps_values(older, newer):
        reason = (
            "the length or precision of its type changed from "
            f"{full_type(older)} to {full_type(newer)}"
        )
    else:
        return
    raise SchemaChangeError(relation=newest.qualified_name, column=older.name, reason=reason)
