"""Choose the kind of an SCD table."""

from __future__ import annotations

from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError, ReplicaIdentityError
from pgcdc_assets.merge.kinds.base import Kind
from pgcdc_assets.merge.kinds.current_image import CurrentImage
from pgcdc_assets.merge.kinds.history import History
from pgcdc_assets.merge.kinds.keyless import Bag, ChangeLog
from pgcdc_assets.merge.kinds.soft_deletes import SoftDeletes
from pgcdc_assets.merge.read import version_of_copy
from pgcdc_assets.merge.task import TableWork
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.columns import SystemColumns
from pgcdc_assets.tables.properties import KEY
from pgcdc_assets.tables.state import TargetState

# Columns that some kinds of SCD1 have and others do not.
_MARKS = {"_deleted": "soft deletes", "_op": "a log of changes"}


def choose_kind(spark: SparkSession, zone: RawZone, work: TableWork) -> Kind:
    """Say how a table is written.

    Args:
        spark: a session that nobody else uses meanwhile.

    Raises:
        ReplicaIdentityError: what is asked for needs a key, and the table has none.
        ConfigurationError: the existing table was made as another kind.
    """
    target = work.plan.target
    kind: type[Kind]
    if not _has_key(work):
        relation = work.relations[-1].relation
        if work.scd == 2:
            raise _no_key(relation, "so its versions cannot be told apart: it can have scd: [1]")
        if target.soft_deletes:
            raise _no_key(relation, "so a deleted row cannot be told from those equal to it")
        kind = ChangeLog if target.without_key == "log" else Bag
    elif work.scd == 2:
        kind = History
    else:
        kind = SoftDeletes if target.soft_deletes else CurrentImage
    if work.scd == 1 and work.state is not None:
        _check_made_alike(work, work.state, kind.system)
    return kind(spark, zone, work)


def _has_key(work: TableWork) -> bool:
    """Say whether something tells the rows apart that are to be folded."""
    if work.plan.target.key:
        return True
    if work.plan.copy is not None:
        return bool(version_of_copy(work, work.plan.copy).relation.row_key)
    return work.state is None or work.state.properties.get(KEY) != ""


def _check_made_alike(work: TableWork, state: TargetState, system: SystemColumns) -> None:
    sent = {c.name for version in work.relations for c in version.relation.columns}
    wanted = {name for name, _, _ in system}
    for column, meaning in _MARKS.items():
        if column in sent or (column in wanted) == (column in state.columns):
            continue
        made = "with" if column in state.columns else "without"
        raise ConfigurationError(
            reason=f"Table {work.plan.target.qualified_name}: its SCD1 table was made {made} "
            f"{meaning}, and its settings say otherwise now. Make it anew: `pgcdc rebuild`."
        )


def _no_key(relation: Relation, reason: str) -> ReplicaIdentityError:
    """Say that what is asked of a table needs a key."""
    return ReplicaIdentityError(
        relation=relation.qualified_name,
        identity=relation.identity_name,
        reason=f"it has no primary key, and no key is configured, {reason}",
        remedy="ALTER TABLE ... ADD PRIMARY KEY (...), or name the key in the settings",
    )
