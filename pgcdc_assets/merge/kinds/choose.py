"""Choose the kind of an SCD table."""

from __future__ import annotations

from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError, rebuild_command
from pgcdc_assets.merge.kinds.base import TableKind
from pgcdc_assets.merge.kinds.current_image import CurrentImage
from pgcdc_assets.merge.kinds.history import History
from pgcdc_assets.merge.kinds.keyless import KeylessBag, KeylessLog
from pgcdc_assets.merge.kinds.soft_deletes import SoftDeletes
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.columns import DELETED, OP, SystemColumns, is_log
from pgcdc_assets.tables.properties import KEY
from pgcdc_assets.tables.state import ScdState

# Columns that distinguish the kinds of SCD1 table.
_MARKS = {DELETED: "soft deletes", OP: "a log of changes"}


def choose_table_kind(spark: SparkSession, zone: RawZone, task: MergeTask) -> TableKind:
    """Choose the class that writes a table.

    Args:
        spark: a session that no other thread uses at the same time.

    Raises:
        ConfigurationError: the existing table is of another kind.
    """
    target = task.plan.target
    kind: type[TableKind]
    if task.scd == 2:
        kind = History
    elif target.soft_deletes:
        kind = SoftDeletes
    else:
        has_key = _has_key(task)
        without_key = KeylessLog if is_log(target, has_key=has_key) else KeylessBag
        kind = CurrentImage if has_key else without_key
    if task.scd == 1 and task.state is not None:
        _check_kind_is_unchanged(zone.name, task, task.state, kind.system)
    return kind(spark, zone, task)


def choose_small_kind(
    spark: SparkSession, zone: RawZone, task: MergeTask
) -> CurrentImage | History | None:
    """Choose the class that writes a table, as `choose_table_kind`; None for a kind that only Spark
    merges: also for a history of some columns.
    """
    kind = choose_table_kind(spark, zone, task)
    if isinstance(kind, History):
        return kind if task.plan.target.tracked is None else None
    return kind if isinstance(kind, CurrentImage) else None


def _has_key(task: MergeTask) -> bool:
    """Return whether a key identifies the rows that the task folds."""
    if task.plan.target.key:
        return True
    if task.snapshot_version is not None:
        return bool(task.snapshot_version.relation.row_key)
    return task.state is None or task.state.properties.get(KEY) != ""


def _check_kind_is_unchanged(
    capture: str, task: MergeTask, state: ScdState, system: SystemColumns
) -> None:
    sent = {c.name for version in task.relations for c in version.relation.columns}
    wanted = {name for name, _, _ in system}
    for column, meaning in _MARKS.items():
        if column in sent or (column in wanted) == (column in state.columns):
            continue
        made = "with" if column in state.columns else "without"
        or_key = ", or the key of its source" if column == OP else ""
        name = task.plan.target.qualified_name
        raise ConfigurationError(
            reason=f"Table {name}: its SCD1 table was made {made} {meaning}, but its settings have "
            f"changed{or_key}. Rebuild the table with: {rebuild_command(capture, name)}"
        )
