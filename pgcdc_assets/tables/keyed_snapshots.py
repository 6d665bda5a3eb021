"""The snapshots that a history and soft deletes can use: those whose rows have a key.

If a source table loses its key, the next snapshot has rows without a key. This snapshot makes the
current image a multiset. A history cannot become a multiset: the history keeps the state from
before the loss, and continues with the first snapshot that has a key again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pgcdc_assets.errors import ReplicaIdentityError
from pgcdc_assets.lsn import Position
from pgcdc_assets.protocol.relation import Relation, ReplicaIdentity
from pgcdc_assets.raw.relations.source_relations import SourceRelations
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.settings import CdcTable

# Identities whose old tuples hold the columns of an index, and nothing else.
KEYED = frozenset({ReplicaIdentity.DEFAULT, ReplicaIdentity.INDEX})

Relations = Callable[[int], SourceRelations]


def has_key(target: CdcTable, relation: Relation) -> bool:
    """Return whether a key identifies the rows of a relation.

    A configured key identifies them, unless updates and deletes bring no key at all.
    """
    if target.key:
        is_lost = relation.replica_identity in KEYED
        return not is_lost or any(column.is_key for column in relation.columns)
    return bool(relation.row_key)


def snapshots_with_key(
    target: CdcTable,
    snapshots: Sequence[Snapshot],
    relations: Relations,
    after: Position | None = None,
) -> list[Snapshot]:
    """Return the snapshots of a table whose rows have a key.

    Args:
        relations: returns the relations of an epoch.
        after: ignore snapshots up to this position.
    """
    return [
        snapshot
        for snapshot in snapshots
        if snapshot.name == target.name
        and (after is None or snapshot.position > after)
        and _without_key(target, snapshot, relations) is None
    ]


def newest_alike(
    target: CdcTable, snapshots: Sequence[Snapshot], relations: Relations
) -> list[Snapshot]:
    """Return the newest snapshots of a table that all have a key, or that all have none.

    A log of changes, which a table without a key can have, does not become a current image.
    """
    own = sorted(
        (snapshot for snapshot in snapshots if snapshot.name == target.name),
        key=lambda snapshot: snapshot.position,
    )
    keyed = [_without_key(target, snapshot, relations) is None for snapshot in own]
    first = max((n for n, has_key in enumerate(keyed, 1) if has_key != keyed[-1]), default=0)
    return own[first:]


def newest_without_key(
    target: CdcTable, snapshots: Sequence[Snapshot], relations: Relations
) -> Relation | None:
    """Return the relation of a table's newest snapshot if its rows have no key; otherwise None."""
    own = [snapshot for snapshot in snapshots if snapshot.name == target.name]
    newest = max(own, key=lambda snapshot: snapshot.position, default=None)
    return None if newest is None else _without_key(target, newest, relations)


def _without_key(target: CdcTable, snapshot: Snapshot, relations: Relations) -> Relation | None:
    version = relations(snapshot.epoch).snapshot_version(snapshot)
    return None if version is None or has_key(target, version.relation) else version.relation


def no_key_error(target: CdcTable, scd: int, relation: Relation) -> ReplicaIdentityError:
    """Return the error of a table whose kind needs a key, and whose newest snapshot has none."""
    reason = "it has no primary key, and no key is configured, "
    if target.key:
        reason = f"it has no column of the configured key {', '.join(target.key)}, "
    if scd == 2:
        reason += "so versions cannot be assigned to rows: use scd: [1]"
    else:
        reason += "so a deleted row cannot be distinguished from equal rows"
    return ReplicaIdentityError(
        relation=relation.qualified_name,
        identity=relation.replica_identity.sql,
        reason=reason,
        remedy="ALTER TABLE ... ADD PRIMARY KEY (...), or name the key in the settings",
    )
