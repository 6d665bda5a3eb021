"""The identity of each column of an SCD table: the column of the source that it follows.

A name does not identify a column, because a column can be renamed, or dropped and created again.
Epoch, OID and attribute number identify a column: `1/16385.3`. A merge writes them into the
column's metadata whenever it writes the schema of the table, so that the identity is committed
together with the name. `ALTER TABLE ... ADD COLUMNS` cannot write metadata: the property
`pgcdc.columns` identifies such a column, and the dropped columns whose past the table keeps. A
table of an earlier release has neither metadata nor property: the recorded relation version
identifies its columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pgcdc_assets.protocol.relation import Column
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.tables.columns import normalize_name
from pgcdc_assets.tables.properties import COLUMNS

# The key of a column's metadata.
SOURCE = "pgcdc.column"
_DROPPED = " dropped"

# Characters of a schema, as of 250 columns.
_MOST_CACHED = 50_000


@dataclass(frozen=True)
class TableColumn:
    """A column of an SCD table.

    Attributes:
        type: in the form of Spark's DDL.
        source: the identity of the source's column; None for a column that is not the source's, or
            whose identity is unknown.
        is_dropped: the source had dropped the column when the schema was last followed.
        is_noted: the metadata of the column has its identity.
    """

    name: str
    type: str
    comment: str
    source: str | None = None
    is_dropped: bool = False
    is_noted: bool = False


def source_prefix(version: RelationVersion) -> str:
    """Return how the identities of a relation's columns begin."""
    return f"{version.epoch}/{version.relation.relation_id}."


def source_of(version: RelationVersion, column: Column) -> str:
    """Return the identity of a column."""
    # Without an attribute number, no other version has the column.
    number = f"?{column.name}" if column.attnum is None else column.attnum
    return f"{source_prefix(version)}{number}"


def is_certain(source: str | None, prefix: str) -> bool:
    """Return whether an identity names a column of the relation by its attribute number."""
    return source is not None and source.startswith(prefix) and source[len(prefix)] != "?"


def read_table_columns(
    schema: str, properties: Mapping[str, str], prefix: str, recorded: RelationVersion | None
) -> list[TableColumn]:
    """Read the columns of a table, in order.

    Args:
        schema: in the form of Delta's log.
        properties: of the table.
        prefix: of the relation that the table follows now.
        recorded: the relation version that the table records; None if it is not known.
    """
    read = _read_columns if len(schema) > _MOST_CACHED else _cached_columns
    return list(read(schema, properties.get(COLUMNS, "{}"), prefix, recorded))


def _read_columns(
    schema: str, notes: str, prefix: str, recorded: RelationVersion | None
) -> tuple[TableColumn, ...]:
    noted = _read_notes(notes)
    by_name = {}
    if recorded is not None:
        by_name = {
            normalize_name(c.name): source_of(recorded, c) for c in recorded.relation.columns
        }
    found = []
    for field in json.loads(schema)["fields"]:
        name, metadata = normalize_name(field["name"]), field.get("metadata", {})
        written, note = metadata.get(SOURCE), noted.get(name)
        # If both are of this relation, the metadata is newer: it is written without the property.
        candidates = [written, note[0] if note is not None else None]
        if candidates == [None, None]:
            candidates.append(by_name.get(name))
        known = [source for source in candidates if source is not None]
        source = next((s for s in known if s.startswith(prefix)), known[0] if known else None)
        found.append(
            TableColumn(
                field["name"],
                _ddl(field["type"]),
                metadata.get("comment", ""),
                source,
                is_dropped=note == (source, True),
                is_noted=written is not None and written == source,
            )
        )
    return tuple(found)


# A merge of a small table asks four times for its columns, which rarely change.
_cached_columns = lru_cache(512)(_read_columns)


def columns_text(columns: Iterable[tuple[str, str, bool]]) -> str:
    """Return the property that identifies columns: name, identity, whether it was dropped."""
    noted = {name: source + (_DROPPED if is_gone else "") for name, source, is_gone in columns}
    return json.dumps(noted, ensure_ascii=False, sort_keys=True)


def retained_columns(properties: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the columns that the source has dropped and the table has kept."""
    noted = json.loads(properties.get(COLUMNS, "{}"))
    return frozenset(name for name, source in noted.items() if source.endswith(_DROPPED))


def _read_notes(notes: str) -> dict[str, tuple[str, bool]]:
    return {
        normalize_name(name): (text.removesuffix(_DROPPED), text.endswith(_DROPPED))
        for name, text in json.loads(notes).items()
    }


def _ddl(kind: Any) -> str:
    """Return the type of a column of the source, as Spark's DDL prints it."""
    if isinstance(kind, dict):
        if kind["type"] == "array":
            return f"array<{_ddl(kind['elementType'])}>"
        if kind["type"] == "map":
            return f"map<{_ddl(kind['keyType'])}, {_ddl(kind['valueType'])}>"
        if kind["type"] == "struct":
            parts = (f"{field['name']}: {_ddl(field['type'])}" for field in kind["fields"])
            return f"struct<{', '.join(parts)}>"
        return str(kind["type"])
    return {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}.get(
        kind, str(kind)
    )
