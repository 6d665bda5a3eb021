"""Build of an SCD table's schema from relation versions.

A tuple is an array of texts in the order of its own relation version. The newest version of a range
defines the columns. Columns are matched by attnum, so every older version gives each column's
position in its tuples. A table that shows the past has the dropped columns too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from pgcdc_assets.errors import (
    MergeConflict,
    ReplicaIdentityError,
    SchemaChangeError,
    resnapshot_command,
)
from pgcdc_assets.merge.fold.chosen_types import chosen_type
from pgcdc_assets.merge.fold.dropped_columns import RetainedColumn, find_retained
from pgcdc_assets.merge.fold.table_schema import DeltaType, Field, Layout, TableSchema
from pgcdc_assets.merge.fold.type_changes import converted_text, is_followed
from pgcdc_assets.merge.fold.types import delta_type, full_type
from pgcdc_assets.protocol.relation import Column, Relation
from pgcdc_assets.raw.relations.added_columns import find_added_default
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.relations.schema_events import SchemaChange
from pgcdc_assets.tables.columns import (
    SCD1_COLUMNS,
    UNKNOWN_TYPE,
    SystemColumns,
    check_names,
)
from pgcdc_assets.tables.keyed_snapshots import KEYED
from pgcdc_assets.tables.properties import parse_key
from pgcdc_assets.tables.source_columns import TableColumn, source_of

VersionPair = tuple[RelationVersion, RelationVersion]


def build_schema(
    versions: Sequence[RelationVersion],
    key: tuple[str, ...] | None,
    known_key: str | None = None,
    system: SystemColumns = SCD1_COLUMNS,
    known: Sequence[RelationVersion] = (),
    *,
    steps: Iterable[VersionPair] | None = None,
    past: Sequence[TableColumn] | None = None,
    recorded: RelationVersion | None = None,
) -> TableSchema:
    """Build the schema that holds the tuples of all the versions.

    Args:
        versions: of one table, ascending; the last version defines the columns.
        key: the configured key; None without one.
        known_key: the key of the existing table, as `key_text` writes it.
        known: all versions of the table in the epoch, with the defaults of added columns.
        steps: the changes of the schema that no snapshot contains; None: each version follows the
            one before it.
        past: the columns of a table that keeps dropped columns; None: they are left out.
        recorded: the version of the known key; None: the first one.

    Raises:
        SchemaChangeError: the stream does not contain what a change did to older rows.
        MergeConflict: two names collide, or a column of the key is not published.
        ReplicaIdentityError: the replica identity does not contain the key.
    """
    newest, relation = versions[-1], versions[-1].relation
    check_names(relation, system)
    for version in versions:
        if version.relation.relation_id != relation.relation_id:
            raise SchemaChangeError(
                relation=relation.qualified_name,
                column="(all)",
                reason="the table was dropped and created again",
            )
    for older, newer in pairwise(versions) if steps is None else steps:
        _check_step(older.relation, newer.relation)
    names = resolve_names(key, relation, known) if key else relation.row_key
    order = [column.name for column in relation.columns]
    columns = list(relation.columns)
    fields = [_field(column, newest, known) for column in columns]
    found = [dict(match_columns(version.relation, relation)) for version in versions]
    if past is not None:
        for each in find_retained(versions, found, past, known, system):
            columns.append(each.last or Column(each.name, 0))
            fields.append(_retained_field(each))
    if known_key is not None:
        _check_key(known_key, (recorded or versions[0]).relation, relation, names)
    layouts = []
    for version, positions in zip(versions, found, strict=True):
        of_key = [positions.get(order.index(name)) for name in names if name in order]
        _check_identity(version.relation, names, of_key)
        identity = set[int]()
        conversions = {}
        for index, position in positions.items():
            if version.relation.columns[position].is_key:
                identity.add(index)
            convert = converted_text(version.relation.columns[position], columns[index])
            if convert is not None:
                conversions[index] = convert
        layouts.append(
            Layout(
                version.version,
                tuple(positions.get(index) for index in range(len(fields))),
                frozenset(identity if version.relation.replica_identity in KEYED else ()),
                conversions,
            )
        )
    return TableSchema(
        relation=relation,
        version=newest.version,
        fields=tuple(fields),
        key=tuple(order.index(name) for name in names),
        layouts=tuple(layouts),
        system=system,
        nullable_key=tuple(
            order.index(name)
            for name in names
            if relation.has_full_identity and name not in relation.primary_key
        ),
        epoch=newest.epoch,
    )


def resolve_names(
    names: Sequence[str], relation: Relation, known: Sequence[RelationVersion]
) -> tuple[str, ...]:
    """Return the present names of columns that the settings name as they once were called."""
    present = {column.name for column in relation.columns}
    by_attnum = {c.attnum: c.name for c in relation.columns if c.attnum is not None}
    earlier = {
        column.name: by_attnum[column.attnum]
        for version in known
        if version.relation.relation_id == relation.relation_id
        for column in version.relation.columns
        if column.attnum in by_attnum
    }
    return tuple(name if name in present else earlier.get(name, name) for name in names)


def _field(column: Column, version: RelationVersion, known: Sequence[RelationVersion]) -> Field:
    comment = column.type or UNKNOWN_TYPE
    default = find_added_default(column, version.relation, known)
    convert = None if default is None else converted_text(default.column, column)
    return Field(
        column.name,
        delta_type(column),
        comment,
        None if default is None else default.text,
        convert_default=convert,
        source=source_of(version, column),
    )


def _retained_field(column: RetainedColumn) -> Field:
    last, stored = column.last, column.stored
    if last is None:
        assert stored is not None
        # No tuple has a value.
        null = f"CAST(NULL AS {stored.type})"
        kind, comment = DeltaType(stored.type.upper(), lambda _: null), stored.comment
    else:
        kind, comment = delta_type(last), last.type or UNKNOWN_TYPE
        if stored is not None and stored.type != kind.ddl.lower():
            # The settings chose the type.
            kind = chosen_type(last, stored.type.upper().replace(", ", ",")) or kind
    return Field(column.name, kind, comment, source=column.source, is_retained=True)


def _check_key(known_key: str, recorded: Relation, newest: Relation, names: Sequence[str]) -> None:
    """Check that the key has the columns of the table's key, in any order and by any names."""
    found = match_columns(recorded, newest)
    order = {column.name: index for index, column in enumerate(newest.columns)}
    positions = [found.get(order[name]) if name in order else None for name in names]
    now = {None if p is None else recorded.columns[p].name for p in positions}
    if now != set(parse_key(known_key)):
        raise SchemaChangeError(
            relation=newest.qualified_name,
            column=", ".join(names),
            reason="the key of the table changed",
            change=SchemaChange.KEY_CHANGED,
        )


def _check_identity(
    relation: Relation, key: Sequence[str], positions: Sequence[int | None]
) -> None:
    """Check that the old tuples of updates and deletes contain the key.

    Args:
        positions: of the key's columns in a tuple.
    """
    if len(positions) < len(key):
        present = {column.name for column in relation.columns}
        raise _no_key_column(relation, next(name for name in key if name not in present))
    for name, position in zip(key, positions, strict=True):
        if position is None:
            raise _no_key_column(relation, name)
        if relation.replica_identity in KEYED and not relation.columns[position].is_key:
            raise ReplicaIdentityError(
                relation=relation.qualified_name,
                identity=relation.replica_identity.sql,
                reason=f'it does not contain key column "{name}", so a delete does not identify '
                "its row",
                remedy="ALTER TABLE ... REPLICA IDENTITY DEFAULT (or FULL)",
                command=resnapshot_command,
            )


def _no_key_column(relation: Relation, name: str) -> MergeConflict:
    return MergeConflict(
        table=relation.qualified_name,
        reason=f'its key column "{name}" is not among its published columns. Correct `key` of this '
        "table, or publish the column",
    )


def match_columns(older: Relation, newer: Relation) -> Mapping[int, int]:
    """Match the columns of two versions: positions in the older one by positions in the newer.

    Raises:
        SchemaChangeError: an unknown attnum leaves open whether a column was renamed or dropped.
    """
    found = older.match_columns(newer)
    left = [c for i, c in enumerate(older.columns) if i not in found.values()]
    new = [c for i, c in enumerate(newer.columns) if i not in found]
    if left and new and any(c.attnum is None for c in (*left, *new)):
        raise SchemaChangeError(
            relation=newer.qualified_name,
            column=", ".join(column.name for column in left),
            reason="the catalog no longer tells whether it was renamed or dropped",
        )
    return found


def _check_step(older: Relation, newer: Relation) -> None:
    """Check that older rows have the values of the newer version, as far as types go."""
    for index, position in match_columns(older, newer).items():
        before, after = older.columns[position], newer.columns[index]
        if is_followed(before, after):
            continue
        raise SchemaChangeError(
            relation=newer.qualified_name,
            column=after.name,
            reason=f"its type changed from {full_type(before)} to {full_type(after)}",
        )
