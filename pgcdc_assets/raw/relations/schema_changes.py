"""The changes between two versions of a relation, and which of them the stream can replay.

The stream can replay a change if the row changes of the stream and `raw/relations` determine every
row of the table after the change. Otherwise the table needs a new snapshot: the server has
rewritten rows, and the stream has no row change for a rewritten row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pgcdc_assets.protocol.relation import Column, Relation
from pgcdc_assets.raw.relations.schema_events import SchemaChange
from pgcdc_assets.raw.relations.type_changes import is_widened, modifier_text


@dataclass(frozen=True)
class SchemaChangeFound:
    """One change of a table's definition. The attributes have the meaning of `SchemaEvent`."""

    change: SchemaChange
    columns: tuple[str, ...]
    detail: str
    needs_snapshot: bool


def compare_relations(
    before: Relation, after: Relation, is_rewritten: bool | None = None
) -> list[SchemaChangeFound]:
    """Return the changes from one version of a relation to a later version.

    A widened type counts as replayable, although ALTER TYPE ... USING may have changed the values:
    neither the stream nor the catalog keeps the expression. See `uncertain_values`.

    Args:
        before: the earlier version.
        after: the later version, of the same OID.
        is_rewritten: whether the server has rewritten the table between the versions; None:
            unknown. ALTER TABLE ... ADD COLUMN rewrites the table if the older rows get values that
            the catalog does not keep.
    """
    found = []
    if before.name != after.name:
        detail = f"The table {before.qualified_name} is named {after.qualified_name} now."
        found.append(SchemaChangeFound(SchemaChange.TABLE_RENAMED, (), detail, False))
    positions = before.match_columns(after)
    matched = [(before.columns[then], after.columns[now]) for now, then in positions.items()]
    for then, column in enumerate(before.columns):
        if then not in positions.values():
            detail = f"Column {column.name} was dropped."
            found.append(
                SchemaChangeFound(SchemaChange.COLUMN_DROPPED, (column.name,), detail, False)
            )
    for earlier, later in matched:
        found += _compare_columns(earlier, later)
    for now, column in enumerate(after.columns):
        if now not in positions:
            found.append(_added(before, column, is_rewritten))
    found += _compare_keys(before, after, matched)
    return found


def one_value_detail(name: str) -> str:
    """Return the sentence about an added column whose older rows have a value in the catalog."""
    return f"Column {name} was added, with one value for all older rows."


def _compare_columns(before: Column, after: Column) -> Iterator[SchemaChangeFound]:
    name = after.name
    if before.name != name:
        detail = f"Column {before.name} is named {name} now."
        yield SchemaChangeFound(SchemaChange.COLUMN_RENAMED, (before.name, name), detail, False)
    if after.has_type_of(before):
        return
    types = f"from {_type_text(before)} to {_type_text(after)}"
    if is_widened(before, after):
        detail = f"The type of column {name} was widened {types}."
        yield SchemaChangeFound(SchemaChange.TYPE_WIDENED, (name,), detail, False)
    else:
        detail = f"The type of column {name} was changed {types}."
        yield SchemaChangeFound(SchemaChange.TYPE_CHANGED, (name,), detail, True)


def _type_text(column: Column) -> str:
    name = column.type or column.base_type or f"type {column.type_oid}"
    modifier = modifier_text(column)
    return f"{name.removesuffix('[]')}{modifier}[]" if name.endswith("[]") else name + modifier


def _added(before: Relation, column: Column, is_rewritten: bool | None) -> SchemaChangeFound:
    name = (column.name,)
    if column.attnum is None:
        detail = f"Column {column.name} cannot be matched with a column of the catalog."
        return SchemaChangeFound(SchemaChange.COLUMN_ADDED, name, detail, True)
    if column.attnum <= before.highest_attnum:
        detail = f"Column {column.name} is published now, and was not published before."
        return SchemaChangeFound(SchemaChange.PUBLICATION_CHANGED, name, detail, True)
    if column.missing is not None:
        detail = one_value_detail(column.name)
        return SchemaChangeFound(SchemaChange.COLUMN_ADDED, name, detail, False)
    may_have_values = is_rewritten
    if is_rewritten is None:
        # An unknown fact counts as a fact that may have given values to the older rows.
        facts = (column.has_default, column.not_null, column.generated, column.identity)
        may_have_values = any(fact is None or bool(fact) for fact in facts)
    if may_have_values:
        detail = f"Column {column.name} was added, and older rows may have values of their own."
        return SchemaChangeFound(SchemaChange.COLUMN_ADDED, name, detail, True)
    detail = f"Column {column.name} was added, and is NULL in older rows."
    return SchemaChangeFound(SchemaChange.COLUMN_ADDED, name, detail, False)


def _compare_keys(
    before: Relation, after: Relation, matched: list[tuple[Column, Column]]
) -> Iterator[SchemaChangeFound]:
    later_names = {earlier.name: later.name for earlier, later in matched}
    expected = tuple(later_names.get(name, "") for name in before.row_key)
    key = after.row_key
    if key != expected:
        detail = f"The key is {_names(key)} now, and was {_names(before.row_key)}."
        yield SchemaChangeFound(SchemaChange.KEY_CHANGED, key, detail, set(key) != set(expected))
    if before.replica_identity is not after.replica_identity:
        detail = (
            f"The replica identity is {after.replica_identity.sql} now, "
            f"and was {before.replica_identity.sql}."
        )
        yield SchemaChangeFound(SchemaChange.IDENTITY_CHANGED, (), detail, False)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "missing"
