"""The LSN from which on the changes of a declared table cannot be folded without doubt.

The changes end where another relation may have the declared name, where the relation has lost its
key, or at a change whose old tuple lacks the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgcdc_assets.errors import (
    DefiniteError,
    ReplicaIdentityError,
    SchemaChangeError,
    resnapshot_command,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.change_stats import ChangeStats, FollowedTable
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.relations.schema_events import SchemaChange
from pgcdc_assets.raw.relations.source_relations import SourceRelations
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.keyed_snapshots import has_key


@dataclass(frozen=True)
class Doubt:
    """The commit LSN from which on the changes of a declared table cannot be folded.

    Attributes:
        key: the lost key; empty if the relation itself is not certain.
        identity: the replica identity of a change whose old tuple lacks the key; empty otherwise.
    """

    lsn: Lsn
    reason: str
    relation_id: int
    key: tuple[str, ...] = ()
    identity: str = ""

    def error(self, table: TableName) -> DefiniteError:
        """Return the error of a merge that would begin at the LSN, which is a fact of the error."""
        if self.identity:
            return ReplicaIdentityError(
                relation=str(table),
                identity=self.identity,
                reason=self.reason,
                remedy="the statement that `pgcdc check` prints for the partition, or fill the "
                "column and validate its constraint",
                command=resnapshot_command,
            )
        return SchemaChangeError(
            relation=str(table),
            column=", ".join(self.key) or "(all)",
            reason=self.reason,
            lsn=self.lsn,
            relation_id=self.relation_id,
            change=SchemaChange.KEY_CHANGED if self.key else None,
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


def find_lost_key(
    target: CdcTable,
    key: tuple[str, ...],
    stats: ChangeStats,
    versions: Sequence[RelationVersion],
) -> Doubt | None:
    """Find the first change of a relation version without a key, for a table that needs a key.

    Args:
        key: the key of the table.
        stats: of the changes of a range.
        versions: of the relation.
    """
    lost = [
        (Lsn(stats.first_lsns[version.version]), version.relation.relation_id)
        for version in versions
        if version.version in stats.first_lsns and not has_key(target, version.relation)
    ]
    if not lost:
        return None
    lsn, relation_id = min(lost)
    return Doubt(lsn, "the table has no key any more", relation_id, key or ("(key)",))


def find_unidentified(stats: ChangeStats, versions: Sequence[RelationVersion]) -> Doubt | None:
    """Find the first update or delete whose old tuple lacks the key.

    Args:
        stats: of the changes of a range.
        versions: of the relation.
    """
    lsn = stats.unidentified_at
    if lsn is None:
        return None
    relation = max(
        (version for version in versions if version.version in stats.versions),
        key=lambda version: stats.versions[version.version],
    ).relation
    reason = (
        f"an update or delete at {lsn} came without the key ({', '.join(relation.row_key)}), so it "
        "does not identify its row: the key is NULL, or a partition has another replica identity"
    )
    return Doubt(lsn, reason, relation.relation_id, identity=relation.replica_identity.sql)
