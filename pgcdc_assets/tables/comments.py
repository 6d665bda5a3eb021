"""The source's comments in an SCD table, and which comments are the owner's.

A column has the comment of the source's column, or its Postgres type if the source has no comment.
The table's description is the comment of the source's table. The property `pgcdc.comments` has a
digest of each comment that a merge has written: another comment is the owner's, and stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.tables.columns import UNKNOWN_TYPE
from pgcdc_assets.tables.properties import COMMENTS
from pgcdc_assets.tables.source_columns import TableColumn, source_of

# The number of the table's own comment among the comments of its columns.
TABLE = 0


@dataclass(frozen=True)
class CommentChanges:
    """The comments of the source that a table lacks.

    Attributes:
        columns: new comments by column.
        description: the new description of the table; None: unchanged.
        digests: the value of the property `pgcdc.comments`. The property is written before the
            comments: if a process dies in between, neither the old nor the new comments count as
            the owner's.
    """

    columns: Mapping[str, str]
    description: str | None
    digests: str


def digests_text(comments: Iterable[str]) -> str:
    """Return the value of the property for the comments that a merge writes."""
    return json.dumps(sorted(map(_digest, comments)))


def is_of_source(comment: str, properties: Mapping[str, str]) -> bool:
    """Return whether a merge has written a comment of the source."""
    return _digest(comment) in _digests(properties)


def join_digests(written: str, properties: Mapping[str, str], present: Iterable[str]) -> str:
    """Return the value of the property with the digests of older comments that are still there.

    Args:
        written: the value for the comments that are written now.
        properties: of the table.
        present: the comments of the table.
    """
    kept = _digests(properties) & set(map(_digest, present))
    return json.dumps(sorted(kept | set(json.loads(written))))


def find_comment_changes(
    columns: Sequence[TableColumn],
    description: str,
    properties: Mapping[str, str],
    versions: Sequence[RelationVersion],
    comments: Mapping[int, str],
) -> CommentChanges | None:
    """Find the comments that differ from those of the source; None without a difference.

    Args:
        columns: of the table.
        description: of the table; empty without a description.
        properties: of the table.
        versions: of the source table, the newest one last.
        comments: of the source, by attnum.
    """
    types: dict[str, list[str]] = {}
    numbers: dict[str, int] = {}
    for version in versions:
        for column in version.relation.columns:
            if column.attnum is not None:
                source = source_of(version, column)
                numbers[source] = column.attnum
                types.setdefault(source, []).append(column.type or UNKNOWN_TYPE)
    changed: dict[str, str] = {}
    for each in columns:
        if each.source not in numbers or each.is_dropped:
            continue
        had = types[each.source]
        wanted = comments.get(numbers[each.source])
        is_commented = is_of_source(each.comment, properties)
        if wanted is None and is_commented:
            changed[each.name] = had[-1]
        elif wanted not in (None, each.comment) and (is_commented or each.comment in ("", *had)):
            changed[each.name] = wanted or ""
    new_description = None
    wanted = comments.get(TABLE, "")
    if wanted != description and (not description or is_of_source(description, properties)):
        new_description = wanted
    if not changed and new_description is None:
        return None
    written = digests_text({*changed.values(), new_description or ""} - {""})
    present = [description, *(each.comment for each in columns)]
    return CommentChanges(changed, new_description, join_digests(written, properties, present))


def _digests(properties: Mapping[str, str]) -> set[str]:
    return set(json.loads(properties.get(COMMENTS, "[]")))


def _digest(comment: str) -> str:
    return hashlib.sha256(comment.encode()).hexdigest()[:16]
