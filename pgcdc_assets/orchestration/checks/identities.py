"""The check of replica identities: updates and deletes of each table identify their row.

A run of the check reads the catalog by the rules of `pgcdc check`. The lag sensor judges by the
newest catalog poll, which has no identities of partitions: a partitioned table keeps the result of
the newest run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import dagster as dg

from pgcdc_assets.protocol.relation import Relation, ReplicaIdentity
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture

REPLICA_IDENTITY = "replica_identity"


def seen_without_identity(
    zone: RawZone, capture: CdcCapture, recorded: Collection[str]
) -> list[str]:
    """Return the declared tables without a usable identity in the newest catalog poll.

    A table that the poll did not find counts as usable, because other checks report missing tables.

    Args:
        recorded: the tables that failed the newest check.
    """
    epoch = zone.epochs.latest()
    looks = {} if epoch is None else zone.definitions.newest(epoch.epoch).tables
    seen = {one.table: one.definition for one in looks.values()}
    found = []
    for table in capture.tables:
        definition = seen.get(table.name)
        if definition is None or not definition.is_published:
            continue
        if definition.relation.is_partitioned:
            is_lost = table.qualified_name in recorded
        else:
            is_lost = _is_lost(definition.relation)
        if is_lost:
            found.append(table.qualified_name)
    return found


def recorded_failures(instance: dg.DagsterInstance, snapshot: dg.AssetKey) -> list[str]:
    """Return the tables that failed the newest recorded check."""
    key = dg.AssetCheckKey(snapshot, REPLICA_IDENTITY)
    found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(key)
    evaluation = None if found is None else found.evaluation
    if not isinstance(evaluation, dg.AssetCheckEvaluation) or "tables" not in evaluation.metadata:
        return []
    return str(evaluation.metadata["tables"].value).split(", ")


def check_identities(
    snapshot: dg.AssetKey, bad: Sequence[str], table_count: int
) -> dg.AssetCheckResult:
    """List the tables whose updates and deletes Postgres refuses or does not describe."""
    return dg.AssetCheckResult(
        asset_key=snapshot,
        check_name=REPLICA_IDENTITY,
        passed=not bad,
        description=f"Postgres refuses UPDATE and DELETE of {', '.join(bad)}, or does not send "
        "them, or does not say which row they change. `pgcdc check` prints the remedy."
        if bad
        else None,
        metadata={"tables": ", ".join(bad) or "none", "table_count": table_count},
    )


def _is_lost(relation: Relation) -> bool:
    """Return whether the updates of a table without partitions would be refused."""
    identity = relation.replica_identity
    if identity is ReplicaIdentity.DEFAULT:
        return not relation.primary_key
    if identity is ReplicaIdentity.INDEX:
        # The index was dropped.
        return not any(column.is_key for column in relation.columns)
    return identity is ReplicaIdentity.NOTHING
