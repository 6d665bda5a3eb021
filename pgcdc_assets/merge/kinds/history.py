"""SCD type 2: every version of every key, as half-open intervals in commit order.

One MERGE ends current versions and adds new versions. If the changes affect a large part of a range
of keys, the current versions of the range are read, combined with the changes, and rewritten
instead: one shuffle, where a MERGE needs three. Both ways make one commit. The table is partitioned
by `_is_current`, so that a merge never reads the versions that have ended.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.change_stats import Truncation
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.key_range import KeyRange, match_sql
from pgcdc_assets.merge.fold.schema import resolve_names
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.fold.truncates import truncate_sql
from pgcdc_assets.merge.fold.typed_columns import SnapshotRows, type_columns
from pgcdc_assets.merge.fold.versions import AffectedRows, build_versions, typed_events
from pgcdc_assets.merge.kinds import accumulating
from pgcdc_assets.merge.kinds.accumulating import AccumulatingTable
from pgcdc_assets.merge.kinds.base import Counts
from pgcdc_assets.merge.kinds.changed_key import rows_without_key, same_value_sql
from pgcdc_assets.merge.kinds.epoch_columns import add_epochs
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.merge.write import (
    SOURCE_VIEW,
    alter_all,
    create_or_replace,
    insert_sql,
    name_columns,
    replace_where,
    run_merge,
    values_by_name,
)
from pgcdc_assets.spark.sql import delta_table, identifier, timestamp
from pgcdc_assets.tables.columns import (
    EPOCH_COLUMNS,
    IS_CURRENT,
    SCD2_COLUMNS,
    VALID_FROM_EPOCH,
    VALID_FROM_LSN,
    VALID_TO,
    VALID_TO_EPOCH,
    VALID_TO_LSN,
    SystemColumns,
)
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.source_columns import source_of
from pgcdc_assets.tables.state import ScdState, check_written

# A range is rewritten if it has at most this many current versions for each change. With ten the
# rewrite takes as long as a MERGE (measured); the lower limit bounds the bytes that are written.
REPLACED_PER_CHANGE = 4
_IS_CURRENT = "partition._is_current"

PARTITIONED_BY = (IS_CURRENT,)


def write_first_snapshot(path: str, copied: SnapshotRows, epoch: int, step: Step) -> None:
    """Create the table from a snapshot: each row is a version that begins at the snapshot."""
    keep = [
        f"{timestamp(copied.at)} AS valid_from",
        "CAST(NULL AS TIMESTAMP) AS valid_to",
        "true AS is_current",
        f"CAST({int(copied.lsn)} AS BIGINT) AS valid_from_lsn",
        "CAST(NULL AS BIGINT) AS valid_to_lsn",
        f"{epoch} AS valid_from_epoch",
        "CAST(NULL AS INT) AS valid_to_epoch",
        "CAST(-1 AS BIGINT) AS ordinal",
        "'S' AS op",
    ]
    rows = type_columns(copied.frame, copied.schema, copied.schema.copied_text, keep)
    create_or_replace(path, rows, copied.schema, step, PARTITIONED_BY, copied.key)


def current_rows(spark: SparkSession, path: str) -> DataFrame:
    """Read the current versions."""
    return spark.read.format("delta").load(path).where(IS_CURRENT)


def merge_sql(
    path: str, fold: Fold, tracked: Sequence[int] | None, key_range: KeyRange | None, epoch: int
) -> str:
    """Write the MERGE statement. For a table with columns `id` (the key) and `n` it is

        MERGE INTO delta.`/lake/shop/scd2/public/t` t USING pgcdc_source s
        ON t._is_current AND s.is_stored AND t.`id` = s.key_0
        WHEN MATCHED THEN UPDATE SET t._valid_to = s.valid_to, t._valid_to_lsn = s.valid_to_lsn,
            t._valid_to_epoch = s.valid_to_epoch, t._is_current = s.is_current
        WHEN NOT MATCHED AND NOT s.is_stored THEN INSERT (`id`, `n`, _valid_from, ...)
            VALUES (s.value_0, s.value_1, s.valid_from, ...)

    Args:
        epoch: the epoch of the changes.
        key_range: a part of the table that contains every version to be ended.
    """
    fields = list(enumerate(fold.schema.fields))
    ends = [VALID_TO, VALID_TO_LSN, VALID_TO_EPOCH, IS_CURRENT]
    updates = [f"t.{name} = s.{name.removeprefix('_')}" for name in ends]
    if tracked is not None:
        updates += [f"t.{identifier(f.name)} = s.value_{i}" for i, f in fields if i not in tracked]
        updates.append("t._rescued = s.rescued")
    statement = (
        f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s\n"
        f"ON t._is_current AND s.is_stored AND {match_sql(fold, key_range)}\n"
        f"WHEN MATCHED THEN UPDATE SET {', '.join(updates)}\n"
        f"WHEN NOT MATCHED AND NOT s.is_stored THEN {insert_sql(values_by_name(fold.schema))}"
    )
    if fold.stats.truncates:
        statement += f"\n{end_versions_sql(fold.stats.truncates[0], epoch)}"
    return statement


@dataclass(frozen=True)
class RewrittenRange:
    """Versions that replace the current versions of a range of keys.

    Attributes:
        rows: with the table's columns.
        key_range: the range.
        counted: after the write, `altered` is the number of ended or changed versions.
    """

    rows: DataFrame
    key_range: KeyRange
    counted: Observation

    @classmethod
    def of(cls, versions: DataFrame, key_range: KeyRange, schema: TableSchema) -> RewrittenRange:
        """Build the rows from the versions of every key in the range (`build_versions`)."""
        counted = Observation()
        altered = F.expr("count_if(is_stored AND is_touched)").alias("altered")
        return cls(
            versions.observe(counted, altered).select(*name_columns(schema)), key_range, counted
        )

    def write(self, spark: SparkSession, path: str, step: Step) -> None:
        """Write the rows in one commit."""
        condition = f"_is_current AND {self.key_range.condition_sql()}"
        replace_where(spark, self.rows, path, condition, step)

    def count_altered(self) -> int:
        """Return the number of versions that were ended or changed.

        Call it after a check of the commit. If Delta skips the write as a duplicate transaction,
        the count never arrives, and an embedded session waits without a limit.
        """
        return int(self.counted.get["altered"])


def end_sql(lsn: Lsn, at: dt.datetime, epoch: int) -> str:
    """Return the assignments that end a version; the end is not before the beginning."""
    return (
        f"t._valid_to = greatest(t._valid_from, {timestamp(at)}), t._valid_to_lsn = {int(lsn)}L, "
        f"t._valid_to_epoch = {epoch}, t._is_current = false"
    )


def end_versions_sql(truncate: Truncation, epoch: int) -> str:
    """Return the clause that ends every other current version at a TRUNCATE."""
    first = truncate_sql(truncate)
    return (
        "WHEN NOT MATCHED BY SOURCE AND t._is_current THEN UPDATE SET "
        f"t._valid_to = {first}.ts, t._valid_to_lsn = {first}.lsn, "
        f"t._valid_to_epoch = {epoch}, t._is_current = false"
    )


@dataclass(frozen=True)
class History(AccumulatingTable):
    """The writer of a history."""

    system: ClassVar[SystemColumns] = SCD2_COLUMNS
    partitioned_by: ClassVar[tuple[str, ...]] = PARTITIONED_BY

    def write_first_snapshot(self, copied: SnapshotRows, step: Step) -> None:
        """Create the table from a snapshot."""
        write_first_snapshot(self.task.path, copied, self.task.plan.epoch, step)

    def add_system_columns(self, state: ScdState, step: Step) -> Step:
        """Add the epoch columns, if an earlier release wrote the table."""
        if set(EPOCH_COLUMNS) <= set(state.columns):
            return step
        rewrite = step.keeping(state.watermark)
        add_epochs(self.spark, self.zone, self.task.path, self.task.name, rewrite)
        return self.follow_write(rewrite, step)

    def read_stored(self) -> DataFrame:
        """Read the current versions: ended versions never change."""
        return current_rows(self.spark, self.task.path)

    def snapshot_events(self, copied: SnapshotRows, stored: DataFrame | None) -> DataFrame:
        """Write a snapshot as events."""
        began_later = "false"
        if copied.end is not None:
            epoch, end = self.task.plan.epoch, int(copied.end.lsn)
            began_later = f"({VALID_FROM_EPOCH} <=> {epoch} AND {VALID_FROM_LSN} >= {end})"
        return accumulating.snapshot_events(copied, stored, began_later=began_later)

    def end_rows_without_key(
        self, key: Sequence[str | None], copied: SnapshotRows, step: Step
    ) -> None:
        """End the current rows that the columns of a new key do not identify."""
        end = end_sql(*copied.rows_end, self.task.plan.epoch)
        if None in key:
            clause = f"WHEN NOT MATCHED BY SOURCE AND t._is_current THEN UPDATE SET {end}"
            alter_all(self.spark, self.task.path, clause, step)
            return
        names = [name for name in key if name is not None]
        run_merge(
            self.spark,
            rows_without_key(self.read_stored(), names),
            f"MERGE INTO {delta_table(self.task.path)} t USING {SOURCE_VIEW} s\n"
            f"ON t._is_current AND {same_value_sql(names)}\nWHEN MATCHED THEN UPDATE SET {end}",
            step,
        )

    def changed_events(self, touched: AffectedRows) -> DataFrame:
        """Return changes as events with typed values."""
        return typed_events(touched.events, touched.fold, touched.rows, touched.stored)

    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find the versions that begin, and those that end."""
        return self._versions(events, stored, fold).where("is_touched")

    def _versions(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        tracked = _tracked(self.task, fold.schema)
        return build_versions(events, stored, fold, tracked, self.task.plan.epoch)

    def write_range(self, state: ScdState, touched: AffectedRows, step: Step) -> Counts | None:
        """Rewrite the current versions of the range, and add the versions that have ended."""
        fold = touched.fold
        if touched.key_range is None or not self._prefers_rewrite(state, touched):
            return None
        versions = self._versions(self.changed_events(touched), touched.rows, fold)
        written = RewrittenRange.of(versions, touched.key_range, fold.schema)
        written.write(self.spark, self.task.path, step)
        check_written(self.zone, self.task.path, step)
        return Counts(None, written.count_altered(), may_be_rescued=fold.schema.may_rescue)

    def _prefers_rewrite(self, state: ScdState, touched: AffectedRows) -> bool:
        """Return whether a rewrite of the range is cheap, and loses nothing."""
        assert touched.key_range is not None and touched.rows is not None
        schema, stats, files = touched.fold.schema, touched.fold.stats, state.files
        if stats.truncates or not self.may_rewrite(state, schema):
            return False
        if _IS_CURRENT not in files.column_names:
            return False
        current = files.filter(pc.field(_IS_CURRENT))
        # Rows with a NULL key match nothing: a MERGE keeps them, and a rewrite would not.
        if any(_nulls(current, name) != 0 for name in schema.key_names):
            return False
        most = REPLACED_PER_CHANGE * stats.change_count
        estimate = touched.key_range.estimate_rows(current)
        # The estimate usually makes the count unnecessary.
        return estimate is not None and estimate <= most and touched.rows.count() <= most

    def merge_sql(self, fold: Fold, key_range: KeyRange | None) -> str:
        """Return the MERGE statement of an outcome."""
        tracked = _tracked(self.task, fold.schema)
        return merge_sql(self.task.path, fold, tracked, key_range, self.task.plan.epoch)

    def truncation_sql(self, truncate: Truncation) -> str:
        """Return the clause that ends the versions before a TRUNCATE."""
        return end_versions_sql(truncate, self.task.plan.epoch)


def _tracked(task: MergeTask, schema: TableSchema) -> list[int] | None:
    """Find the fields whose change opens a version.

    Raises:
        ConfigurationError: a tracked column is not published.
    """
    names = task.plan.target.tracked
    if names is None:
        return None
    present = resolve_names(names, schema.relation, task.relations)
    once = {source_of(v, c): c.name for v in task.relations for c in v.relation.columns}
    known = {field.name for field in schema.fields} | set(once.values())
    missing = [name for name in present if name not in known]
    if missing:
        raise ConfigurationError(
            reason=f"Table {task.plan.target.qualified_name}: tracked column "
            f'"{missing[0]}" is not among its published columns. Correct `tracked` in the settings.'
        )
    return [
        index
        for index, field in enumerate(schema.fields)
        if (once.get(field.source or "") in names if field.is_retained else field.name in present)
    ]


def _nulls(files: pa.Table, column: str) -> int | None:
    """Count the NULLs of a column by file statistics; None without statistics."""
    name = f"null_count.{column}"
    if name not in files.column_names or files.column(name).null_count:
        return None
    return int(pc.sum(files.column(name)).as_py() or 0)
