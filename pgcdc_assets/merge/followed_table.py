"""The relation whose changes belong to a declared table, and where this is not certain any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pgcdc_assets.errors import SchemaChangeError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.source_relations import SourceRelations
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from pgcdc_assets.merge.change_stats import ChangeStats


class FollowedTable(NamedTuple):
    """A declared table, and the OID of the relation whose changes belong to it."""

    table: TableName
    relation_id: int


@dataclass(frozen=True)
class Doubt:
    """The commit LSN from which on the relation of a declared table is not certain."""

    lsn: Lsn
    reason: str
    relation_id: int

    def error(self, table: TableName) -> SchemaChangeError:
        """Return the error of a merge that would begin at the LSN, which is a fact of the error."""
        return SchemaChangeError(
            relation=str(table),
            column="(all)",
            reason=self.reason,
            lsn=self.lsn,
            relation_id=self.relation_id,
        )


def find_doubt(
    followed: FollowedTable, stats: ChangeStats, relations: SourceRelations, start: Lsn
) -> Doubt | None:
    """Find the first change after which another relation may be the declared table.

    A relation that takes the name of another relation shows that names were exchanged: the
    declared name may already be another relation's. Only a new snapshot decides.

    Args:
        stats: of the changes of a range.
        start: of the range.
    """
    table, relation_id = followed
    doubts = []
    if stats.taken_at is not None:
        doubts.append((stats.taken_at, "the table was dropped and created again"))
    known = {table, relations.snapshot_name(table, relation_id, start)}
    for name, first in stats.names.items():
        if name not in known and relations.was_of_another(name, relation_id, first):
            doubts.append((first, f"the table took the name {name}, which another table had"))
    return Doubt(*min(doubts), relation_id) if doubts else None
