"""The changes between two looks at a table's definition in the catalog.

A look sees what the stream does not announce: rewrites, partitions and the publication. Each gap is
found by the versions of the catalog rows, also if the definition is as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from pgcdc_assets.error_text import first_names
from pgcdc_assets.protocol.relation import Column
from pgcdc_assets.protocol.table_definition import Membership, TableDefinition, is_version
from pgcdc_assets.raw.relations.schema_changes import SchemaChangeFound, compare_relations
from pgcdc_assets.raw.relations.schema_events import SchemaChange
from pgcdc_assets.raw.relations.unsent_rows import find_truncated_partitions, find_unlogged_tables

_OPTIONS = {
    "pubinsert": "insert",
    "pubupdate": "update",
    "pubdelete": "delete",
    "pubtruncate": "truncate",
    "pubviaroot": "publish_via_partition_root",
    "pubgencols": "publish_generated_columns",
    "puballtables": "all tables",
}

# Number of partitions that a sentence names.
_NAMED = 3


def compare_definitions(
    before: TableDefinition, after: TableDefinition, unused: Collection[int] = ()
) -> list[SchemaChangeFound]:
    """Return the changes of one table between two looks.

    Args:
        unused: OIDs of attached and detached partitions that never had a row.
    """
    if not after.is_published:
        if not before.is_published:
            return []
        is_missing = after.membership.publication is None
        if is_missing:
            return [_publication_changed("The publication was dropped or renamed.", False)]
        return [_publication_changed("The publication does not send the table any more.", False)]
    reason = _find_gap(before, after)
    found = [_publication_changed(reason, True)] if reason else []
    if before.membership.is_missing and not reason:
        # The stream fails at a change from the time without the name, so no change is skipped.
        found.append(_publication_changed("The publication has its name again.", False))
    is_rewritten = after.is_rewritten_since(before)
    changes = compare_relations(before.relation, after.relation, is_rewritten)
    for change in changes:
        if change.change is SchemaChange.COLUMN_DROPPED:
            attnums = {c.attnum for c in before.relation.columns if c.name in change.columns}
            if attnums & after.attnums:
                # The publication does not send the column any more.
                continue
        if change.change is SchemaChange.PUBLICATION_CHANGED and reason:
            continue
        found.append(change)
    if is_rewritten:
        found += _find_rewrite(before, after)
        found += _find_uncertain_values(changes)
        found += _find_other_expressions(before, after)
        if not any(one.needs_snapshot or one.change is SchemaChange.TYPE_WIDENED for one in found):
            is_explained = _is_written_for_unsent(before, after)
            found += find_unlogged_tables(before, after, is_explained=is_explained)
        found += find_truncated_partitions(before, after)
    found += _find_other_texts(before, after)
    found += _compare_partitions(before, after, unused)
    return found


def definition_to_keep(before: TableDefinition, after: TableDefinition) -> TableDefinition:
    """Return the definition to keep of a look, for the comparison with the next look.

    A table that the publication does not send keeps the columns that it had when it was sent. A
    publication that may have been renamed is compared with the publication that has its name later.
    The value of the rows that are older than a column is kept after a rewrite: the stream may not
    have announced the column yet.
    """
    if after.is_published:
        return replace(after, relation=after.relation.with_missing_of(before.relation))
    relation = before.relation
    membership = after.membership
    if membership.publication is None and before.membership.publication is not None:
        membership = replace(before.membership, is_missing=True)
    return replace(
        after,
        membership=membership,
        relation=replace(relation, schema=after.relation.schema, table=after.relation.table),
        column_versions=before.column_versions,
    )


def _find_gap(before: TableDefinition, after: TableDefinition) -> str | None:
    """Return why the stream may lack changes of a table that the publication sends now."""
    then, now = before.membership, after.membership
    if not before.is_published and not then.is_missing:
        return "The publication sends the table again."
    if then.publication is None or now.publication is None:
        return "The publication was dropped and created again."
    if then.publication["oid"] != now.publication["oid"]:
        return "The publication was dropped and created again."
    if then.publication["row_version"] != now.publication["row_version"]:
        changed = [
            name
            for key, name in _OPTIONS.items()
            if then.publication.get(key) != now.publication.get(key)
        ]
        # Another owner or name explains the new version. The version has no other explanation if
        # options were altered and altered back.
        is_explained = (
            then.is_missing or then.publication["pubowner"] != now.publication["pubowner"]
        )
        if changed or not is_explained:
            return f"The publication was altered ({', '.join(changed) or 'and altered back'})."
    if then.inherits != now.inherits and not _is_sent_itself(after):
        return "The partition was detached from its published table and attached again."
    lost = _entries(then) - _entries(now)
    gained = _entries(now) - _entries(then)
    # An ancestor without a row filter may publish a partition that gets one.
    is_limited = any(row.get("prqual") or row.get("columns") for row in then.tables) or any(
        row.get("prqual") and row not in then.tables for row in now.tables
    )
    if before.relation.schema != after.relation.schema:
        # A table that is moved from one published schema to another is sent all the time.
        lost -= _schemas(now)
        gained -= _schemas(then)
        is_limited = is_limited or not _entries(then) & _entries(now)
    if lost or (gained and is_limited):
        return (
            "The table's row filter or column list was changed, or the table left the publication "
            "and returned."
        )
    if _has_row_filter(after) and _other_unsent_expressions(before, after):
        return "A generated column has another expression, and the row filter may select by it."
    has_only_schemas = now.schemas and not now.tables and not now.publication["puballtables"]
    is_moved = before.type_version != after.type_version and before.owner == after.owner
    if has_only_schemas and is_moved and before.relation.name == after.relation.name:
        return "The table may have left the published schema and returned."
    return None


def _is_sent_itself(definition: TableDefinition) -> bool:
    """Return whether a table is sent on its own account, and not because of an ancestor."""
    membership, own = definition.membership, definition.relation.relation_id
    assert membership.publication is not None
    schemas = {int(schema) for oid, schema, *_ in membership.classes if int(oid) == own}
    return (
        bool(membership.publication["puballtables"])
        or any(int(row["prrelid"]) == own for row in membership.tables)
        or any(int(row["pnnspid"]) in schemas for row in membership.schemas)
    )


def _has_row_filter(definition: TableDefinition) -> bool:
    return any(row.get("prqual") for row in definition.membership.tables)


def _other_unsent_expressions(before: TableDefinition, after: TableDefinition) -> bool:
    """Return whether a column that is not sent has another default or generation expression.

    ALTER TABLE ... SET EXPRESSION changes the values of the column in all rows, and the stream has
    no change of a row.
    """
    unsent = after.attnums - {column.attnum for column in after.relation.columns}
    then, now = before.default_versions, after.default_versions
    return any(n in then and n in now and then[n] != now[n] for n in unsent)


def _entries(membership: Membership) -> set[tuple[str, str, str]]:
    """Return the entries of the publication that cover a table, with their versions."""
    kinds = {"table": membership.tables, "schema": membership.schemas}
    return {(kind, row["oid"], row["xmin"]) for kind, rows in kinds.items() for row in rows}


def _schemas(membership: Membership) -> set[tuple[str, str, str]]:
    """Return the entries of all published schemas."""
    publication = membership.publication or {}
    return {("schema", oid, xmin) for oid, xmin in publication.get("schemas") or ()}


def _publication_changed(reason: str, needs_snapshot: bool) -> SchemaChangeFound:
    return SchemaChangeFound(SchemaChange.PUBLICATION_CHANGED, (), reason, needs_snapshot)


def _find_rewrite(before: TableDefinition, after: TableDefinition) -> Iterator[SchemaChangeFound]:
    """Find an ALTER TYPE ... USING that keeps the type of a column and rewrites the table.

    VACUUM FULL, CLUSTER and TRUNCATE write no row of pg_attribute, except that a rewrite clears the
    value of the rows that are older than a column.
    """
    earlier = {column.attnum: column for column in before.relation.columns}
    pairs = [(earlier[c.attnum], c) for c in after.relation.columns if c.attnum in earlier]
    # Up to Postgres 15, ALTER TYPE writes the rows of the later columns as well.
    versions = [
        after.column_versions.get(new.attnum or 0) for old, new in pairs if not new.has_type_of(old)
    ]
    # Without the numbers of the commands, other columns may have a rewrite of their own.
    retyped = {version for version in versions if version and version.cmin is not None}
    rewritten = [
        new.name
        for old, new in pairs
        if new.has_type_of(old)
        and after.column_versions.get(new.attnum or 0) not in retyped
        and _is_written(before, after, new.attnum or 0)
        and not _is_only_cleared(after, old, new)
    ]
    if rewritten:
        detail = f"ALTER TYPE may have changed the values of {' or '.join(rewritten)}."
        yield SchemaChangeFound(SchemaChange.TABLE_REWRITTEN, (), detail, True)


def _find_other_expressions(
    before: TableDefinition, after: TableDefinition
) -> Iterator[SchemaChangeFound]:
    """Find partitions in which ALTER TABLE ... SET EXPRESSION has changed generated values.

    A partition may have an expression of its own, so no column of the partitioned table is written.
    A row filter may select by a generated column that is not sent.
    """
    own = [column.attnum or 0 for column in after.relation.columns if column.generated]
    is_used = own or _has_row_filter(after)
    if not is_used or any(_is_written(before, after, attnum) for attnum in own):
        return
    names = [
        now.name
        for oid, now in after.partitions.items()
        if (then := before.partitions.get(oid)) is not None
        and then.relfilenode != now.relfilenode
        and then.generated
        and now.generated not in (then.generated, None)
    ]
    if names:
        detail = f"Generated values may have another expression in partitions: {_some(names)}."
        yield SchemaChangeFound(SchemaChange.TABLE_REWRITTEN, (), detail, True)


def _is_written_for_unsent(before: TableDefinition, after: TableDefinition) -> bool:
    """Return whether a generated column that is not sent explains that ALTER TABLE wrote the table.

    The column is new, or has another expression.
    """
    unsent = after.attnums - {column.attnum for column in after.relation.columns}
    return not unsent <= before.attnums or any(
        after.default_versions.get(n) != before.default_versions.get(n) for n in unsent
    )


def _find_uncertain_values(changes: Iterable[SchemaChangeFound]) -> Iterator[SchemaChangeFound]:
    """Find an ALTER TYPE that widened a type and rewrote the table, perhaps with USING."""
    of_types = [change for change in changes if change.change is SchemaChange.TYPE_WIDENED]
    widened = [name for change in of_types for name in change.columns]
    if widened:
        detail = f"ALTER TYPE rewrote the table, and may have changed {' or '.join(widened)}."
        yield SchemaChangeFound(SchemaChange.VALUES_UNCERTAIN, tuple(widened), detail, False)


def _find_other_texts(
    before: TableDefinition, after: TableDefinition
) -> Iterator[SchemaChangeFound]:
    """Find types whose stored values have other texts now, without a new version of any row.

    ALTER TYPE ... RENAME VALUE changes the label of an enum's values; a composite type that gains
    or loses an attribute has another number of values. An added enum value changes no stored one.
    A type that was altered back had other texts in the rows that were written in between.
    """
    then, now = before.type_texts or {}, after.type_texts or {}
    altered, restored = set[str](), set[str]()
    for oid, texts in now.items():
        known = then.get(oid, {}).items()
        changed = {part for part, text in known if texts.get(part, text) != text} - {"name"}
        if changed:
            (restored if all(map(is_version, changed)) else altered).add(texts["name"])
    sentences = (
        (altered, "The values of type {} have other texts now."),
        (restored, "The texts of the values of type {} were altered, and altered back."),
    )
    details = [text.format(" or ".join(sorted(names))) for names, text in sentences if names]
    if details:
        yield SchemaChangeFound(SchemaChange.TABLE_REWRITTEN, (), " ".join(details), True)


def _is_written(before: TableDefinition, after: TableDefinition, attnum: int) -> bool:
    then, now = before.column_versions.get(attnum), after.column_versions.get(attnum)
    return then is not None and now is not None and then.xmin != now.xmin


def _is_only_cleared(after: TableDefinition, old: Column, new: Column) -> bool:
    """Return whether a rewrite wrote a column's row only to clear `attmissingval`.

    The rewrite of a table first writes the row of pg_class, with the new file, and then clears the
    values. ALTER TYPE writes the column's row before it rewrites the table. The numbers of the
    commands show the order, if one transaction has written both rows. A later statement of the
    transaction may write the column's row again. ALTER TYPE writes the row of pg_attrdef of a
    column with a default again, and SET NOT NULL shows in the column itself. A rewrite does not
    write the row of pg_class in its first command: the number 0 is from the replay of WAL.
    """
    if old.missing is None or new.missing is not None:
        return False
    if None not in (old.not_null, new.not_null) and old.not_null != new.not_null:
        return False
    attnum = new.attnum or 0
    column, table = after.column_versions[attnum], after.class_version
    if column.cmin is None or not table.cmin:
        return False
    has_other_default = after.default_versions.get(attnum) == column.xmin
    return column.xmin == table.xmin and column.cmin > table.cmin and not has_other_default


def _compare_partitions(
    before: TableDefinition, after: TableDefinition, unused: Collection[int]
) -> Iterator[SchemaChangeFound]:
    moved = before.moved_partitions(after)
    attached = {oid: after.partitions[oid] for oid in moved & after.partitions.keys()}
    if attached:
        names = _some(partition.name for partition in attached.values())
        is_created = all(partition.is_new_table for partition in attached.values())
        # The stream has every row of a table that was created as a partition, or attached before
        # its first row.
        is_complete = all(oid in unused or attached[oid].is_new_table for oid in attached)
        detail = f"Partitions were {'created' if is_created else 'attached'}: {names}."
        yield SchemaChangeFound(SchemaChange.PARTITION_ATTACHED, (), detail, not is_complete)
    detached = {oid: before.partitions[oid] for oid in moved - after.partitions.keys()}
    if detached:
        names = _some(partition.name for partition in detached.values())
        detail = f"Partitions were detached or dropped: {names}."
        had_rows = not all(oid in unused for oid in detached)
        yield SchemaChangeFound(SchemaChange.PARTITION_DETACHED, (), detail, had_rows)


def _some(names: Iterable[str]) -> str:
    return first_names(sorted(names), _NAMED)
