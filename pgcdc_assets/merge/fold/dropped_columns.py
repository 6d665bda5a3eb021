"""Columns that the source has dropped and a table has kept, because the table shows the past.

A row from before the drop keeps its value; a later row has NULL. The column keeps its name, unless
another column of the source has, or had, the name: then `b` becomes `b_dropped_3`, with its attnum.
The name follows from the relation versions alone, so a rebuild finds the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pgcdc_assets.protocol.relation import Column
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.tables.columns import SystemColumns, normalize_name
from pgcdc_assets.tables.source_columns import TableColumn, is_certain, source_of, source_prefix


@dataclass(frozen=True)
class RetainedColumn:
    """A dropped column.

    Attributes:
        name: in the table.
        source: the column of the source.
        last: the column as the source last had it; None if no tuple has the column.
        stored: the column of the table; None if the table does not have the column yet.
    """

    name: str
    source: str
    last: Column | None
    stored: TableColumn | None


def find_retained(
    versions: Sequence[RelationVersion],
    found: Sequence[dict[int, int]],
    past: Sequence[TableColumn],
    known: Sequence[RelationVersion],
    system: SystemColumns,
) -> Iterator[RetainedColumn]:
    """Yield each dropped column.

    Args:
        versions: ascending; the last one defines the present columns.
        found: for each version, the positions of the fields; dropped columns are added.
        past: the columns of the existing table; empty without a table.
        known: all versions of the table up to the end of the range.
    """
    newest = versions[-1]
    present = {source_of(newest, column) for column in newest.relation.columns}
    last: dict[str, Column] = {}
    aliases: dict[str, str] = {}
    for version, positions in zip(versions, found, strict=True):
        matched = set(positions.values())
        for position, column in enumerate(version.relation.columns):
            if position not in matched:
                last[source_of(version, column)] = column
    there = {
        stored.source: stored
        for stored in past
        if stored.source is not None and stored.source not in present and _is_gone(stored, newest)
    }
    for source in [source for source in last if not is_certain(source, source_prefix(newest))]:
        # The catalog no longer had the attnum. A dropped column of this name is the same one.
        named = {of: column.name for of, column in last.items() if of != source}
        named |= {of: column.name for of, column in there.items() if of not in named}
        same = [of for of, name in named.items() if name == last[source].name]
        if len(same) == 1:
            aliases[source] = same[0]
            last[same[0]] = last.pop(source)
    names = {normalize_name(column.name) for column in newest.relation.columns}
    taken = names | {normalize_name(name) for name, _, _ in system}
    taken |= {normalize_name(column.name) for column in past if column.source is None}
    reused = _names_by_source(newest, known)
    index = len(newest.relation.columns)
    for source in [*there, *(source for source in last if source not in there)]:
        final, stored = last.get(source), there.get(source)
        name = final.name if final is not None else stored.name if stored is not None else ""
        others = {n for of, held in reused.items() if of != source for n in held}
        if normalize_name(name) in taken | others:
            name = _other_name(name, source, taken | others)
        taken.add(normalize_name(name))
        for version, positions in zip(versions, found, strict=True):
            for position, each in enumerate(version.relation.columns):
                own = source_of(version, each)
                if aliases.get(own, own) == source:
                    positions[index] = position
        yield RetainedColumn(name, source, final, stored)
        index += 1


def _is_gone(column: TableColumn, newest: RelationVersion) -> bool:
    """Return whether the source has dropped a column of the table.

    A column of another epoch or of an earlier table is matched by its name.
    """
    name = normalize_name(column.name)
    same = [each for each in newest.relation.columns if normalize_name(each.name) == name]
    if column.is_dropped or not same:
        return True
    return is_certain(column.source, source_prefix(newest)) and same[0].attnum is not None


def _names_by_source(
    newest: RelationVersion, known: Sequence[RelationVersion]
) -> dict[str, set[str]]:
    """Return all names that each column of the relation had, as far as its attnum is known."""
    names: dict[str, set[str]] = {}
    for version in (*known, newest):
        if source_prefix(version) == source_prefix(newest):
            for column in version.relation.columns:
                if column.attnum is not None:
                    held = names.setdefault(source_of(version, column), set())
                    held.add(normalize_name(column.name))
    return names


def _other_name(name: str, source: str, taken: set[str]) -> str:
    # The rest of an uncertain identity is a name, which may have dots.
    number = source.partition(".")[2]
    base = other = f"{name}_dropped_{number}" if number.isdecimal() else f"{name}_dropped"
    count = 1
    while normalize_name(other) in taken:
        count += 1
        other = f"{base}_{count}"
    return other
