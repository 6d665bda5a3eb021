"""The columns and comments that the owner of an SCD table has added.

Merges write the columns that the source has or had, and the system columns. Comments of merges are
the types that a column has or had, and the source's comments. All other columns and comments are
the owner's, and are kept when a merge replaces the table: the columns without values, the comments
unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.columns import (
    CHANGE_LOG_COLUMNS,
    SCD2_COLUMNS,
    SOFT_DELETE_COLUMNS,
    UNKNOWN_TYPE,
    normalize_name,
)
from pgcdc_assets.tables.comments import is_of_source
from pgcdc_assets.tables.source_columns import SOURCE

_SYSTEM = (*SOFT_DELETE_COLUMNS, *CHANGE_LOG_COLUMNS, *SCD2_COLUMNS)


@dataclass(frozen=True)
class OwnedColumns:
    """The owner's columns and comments.

    Attributes:
        fields: columns that no merge wrote, in the form of Delta's log.
        comments: by the normalized name of a merge's column.
    """

    fields: tuple[dict[str, Any], ...]
    comments: dict[str, str]

    def add_to(self, schema: str) -> str:
        """Return another schema with the owner's columns and comments, both in Delta's form."""
        parsed = json.loads(schema)
        known = {normalize_name(field["name"]) for field in parsed["fields"]}
        for field in parsed["fields"]:
            comment = self.comments.get(normalize_name(field["name"]))
            if comment is not None:
                field["metadata"] = {**field.get("metadata", {}), "comment": comment}
        parsed["fields"] += [f for f in self.fields if normalize_name(f["name"]) not in known]
        return json.dumps(parsed)


NOTHING_OWNED = OwnedColumns((), {})


def find_owned(
    schema: str, properties: Mapping[str, str], versions: Iterable[RelationVersion]
) -> OwnedColumns:
    """Find the owner's columns and comments.

    Args:
        schema: in the form of Delta's log.
        properties: of the table.
        versions: all relation versions of the source table.
    """
    ours: dict[str, set[str]] = {}
    for name, _, comment in _SYSTEM:
        ours.setdefault(normalize_name(name), set()).add(comment)
    for version in versions:
        for column in version.relation.columns:
            ours.setdefault(normalize_name(column.name), set()).add(column.type or "")
    fields, comments = [], {}
    for field in json.loads(schema)["fields"]:
        comment = field.get("metadata", {}).get("comment")
        of_merges = ours.get(normalize_name(field["name"]))
        if of_merges is None:
            # A merge gives a dropped column another name if its name is used again.
            if SOURCE not in field.get("metadata", {}):
                fields.append(field)
        elif (
            comment is not None
            and comment not in of_merges
            and comment != UNKNOWN_TYPE
            and not is_of_source(comment, properties)
        ):
            comments[normalize_name(field["name"])] = comment
    return OwnedColumns(tuple(fields), comments)


def versions_of_table(zone: RawZone, schema: str, table: str) -> list[RelationVersion]:
    """List the relation versions of a source table over all epochs."""
    newest = zone.epochs.latest()
    return [
        version
        for epoch in range(1, (newest.epoch if newest else 0) + 1)
        for version in zone.relations.versions(epoch)
        if (version.relation.schema, version.relation.table) == (schema, table)
    ]
