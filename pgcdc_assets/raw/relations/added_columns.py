"""Columns that were added to a table while it was captured, and the value of the rows from before.

`ALTER TABLE ... ADD COLUMN n int DEFAULT 5` writes no row: Postgres keeps the value in the catalog,
and `raw/relations` keeps it with each version of the relation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Column, Relation
from pgcdc_assets.raw.relations.registry import RelationVersion


@dataclass(frozen=True)
class AddedDefault:
    """The value of the rows from before a column was added.

    Attributes:
        text: as Postgres prints it.
        column: the column as it was when the text was read.
        since: where the column was first seen; None: in the oldest version that is known.
    """

    text: str
    column: Column
    since: Lsn | None


def find_added_default(
    column: Column, relation: Relation, known: Sequence[RelationVersion]
) -> AddedDefault | None:
    """Find the value of a column in rows that are older than the column; None: NULL or unknown.

    A column that is missing in an earlier version may have existed without being published. It was
    added later only if its attnum is higher than all attnums of the earlier version.

    Args:
        relation: the newest version that matters.
        known: all versions of the table in the epoch.
    """
    attnum = column.attnum
    if attnum is None:
        return None
    ours = sorted(
        (v for v in known if v.relation.relation_id == relation.relation_id),
        key=lambda v: v.version,
    )
    described: Column | None = None
    since: Lsn | None = None
    is_known = is_older_known = False
    for version in ours:
        found = next((c for c in version.relation.columns if c.attnum == attnum), None)
        if found is not None:
            if not is_known and is_older_known:
                since = version.lsn
            is_known = True
            described = found if found.missing is not None else described
        elif not is_known:
            is_older_known = True
            alike = _alike(version.relation, ours)
            if min(each.highest_attnum for each in alike) >= attnum:
                return None
    if described is None or described.missing is None:
        return None
    return AddedDefault(described.missing, described, since)


def _alike(relation: Relation, known: Sequence[RelationVersion]) -> list[Relation]:
    """Return the versions of a relation with the same columns, under whatever name.

    The attribute count of a version that was registered late, from a backlog, may be newer than the
    version.
    """
    return [v.relation for v in known if v.relation.columns == relation.columns]
