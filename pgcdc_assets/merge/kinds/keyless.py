"""The kinds of SCD1 table that a source table without a key can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.errors import ReplicaIdentityError, resnapshot_command
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.change_stats import ChangeStats
from pgcdc_assets.merge.fold.events import Fold, build_bag
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.fold.typed_columns import type_columns
from pgcdc_assets.merge.fold.versions import contents_sql
from pgcdc_assets.merge.kinds.base import Counts, TableKind, rows_in
from pgcdc_assets.merge.read import read_changes, read_snapshot
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.merge.write import (
    SOURCE_VIEW,
    append,
    create_or_replace,
    insert_sql,
    replace_contents,
    run_merge,
    values_by_name,
)
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.spark.sql import delta_table, identifier, string
from pgcdc_assets.tables.columns import CHANGE_LOG_COLUMNS, LSN, ORDINAL, SystemColumns
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.state import ScdState

MISSING_ROW = "pgcdc: a row that was taken out of a bag is not in it"
_COLUMNS = ("rescued", "lsn", "ordinal", "commit_ts", "is_content")


@dataclass(frozen=True)
class KeylessBag(TableKind):
    """The writer of the rows as a multiset, each as often as the source has it."""

    def apply_snapshot(self, state: ScdState | None, snapshot: Snapshot, step: Step) -> Counts:
        """Replace the contents."""
        schema = self.build_snapshot_schema()
        rows = copied_rows(
            read_snapshot(self.spark, self.zone, snapshot), schema, snapshot.snapshot_lsn
        )
        self.replace_table(state, rows, schema, step)
        return Counts(snapshot.row_count, 0, rows_in(state), schema.may_rescue)

    def apply_changes(self, state: ScdState | None, step: Step) -> Counts:
        """Add the remaining rows, and delete as many rows as the changes removed."""
        task, stats = self.task, self.task.stats
        assert stats is not None and state is not None
        if not task.version_order:
            return self.empty(state, step)
        _check_whole_rows(task, stats)
        schema = self.build_changes_schema(state)
        state, step = self.follow_columns(state, schema, step)
        fold = Fold(schema, stats)
        changes = read_changes(self.spark, self.zone, task)
        if state.is_empty or stats.truncates:
            rows = fold_bag(changes, fold, None)
            replace_contents(task.path, rows, schema, step)
            return Counts(None, 0, rows_in(state), schema.may_rescue)
        if not stats.old_kinds:
            append(task.path, fold_bag(changes, fold, None), schema, step)
            return Counts(None, may_be_rescued=schema.may_rescue)
        rows = fold_bag(changes, fold, self.read_table())
        statement = merge_sql(task.path, schema)
        return Counts(*run_merge(self.spark, rows, statement, step), schema.may_rescue)


@dataclass(frozen=True)
class KeylessLog(TableKind):
    """The writer of a log: every change is appended as a row."""

    system: ClassVar[SystemColumns] = CHANGE_LOG_COLUMNS
    row_condition: ClassVar[str] = "t._op <> 'T'"
    shows_the_past: ClassVar[bool] = True

    def apply_snapshot(self, state: ScdState | None, snapshot: Snapshot, step: Step) -> Counts:
        """Append the rows of the snapshot; earlier rows of the log stay."""
        task, schema = self.task, self.build_snapshot_schema(state)
        rows = copied_rows(
            read_snapshot(self.spark, self.zone, snapshot), schema, snapshot.snapshot_lsn
        )
        if state is None:
            create_or_replace(task.path, rows, schema, step, begins_with=snapshot.key)
        else:
            state, step = self.follow_relation(state, schema, step)
            append(task.path, rows, schema, step)
        return Counts(snapshot.row_count, may_be_rescued=schema.may_rescue)

    def apply_changes(self, state: ScdState | None, step: Step) -> Counts:
        """Append the changes."""
        task, stats = self.task, self.task.stats
        assert stats is not None and state is not None
        if task.version_order:
            _check_whole_rows(task, stats)
        schema = self.build_changes_schema(state)
        state, step = self.follow_columns(state, schema, step)
        changes = read_changes(self.spark, self.zone, task, keeps_truncated=True)
        rows = logged_changes(changes, Fold(schema, stats))
        append(task.path, rows, schema, step)
        return Counts(None, may_be_rescued=schema.may_rescue)


def _check_whole_rows(task: MergeTask, stats: ChangeStats) -> None:
    """Check that updates and deletes bring their whole old rows.

    Raises:
        ReplicaIdentityError: a change came while the replica identity was not FULL.
    """
    if stats.old_kinds - {"O"}:
        raise ReplicaIdentityError(
            relation=task.plan.target.qualified_name,
            identity="other than FULL",
            reason="updates or deletes came without their whole old rows, and a table without a "
            "key needs the old rows to find the changed ones",
            remedy="ALTER TABLE ... REPLICA IDENTITY FULL",
            command=resnapshot_command,
        )


def copied_rows(copied: DataFrame, schema: TableSchema, lsn: Lsn) -> DataFrame:
    """Return the rows of a snapshot with typed columns, each with a position of its own.

    Args:
        copied: column `new`, in the layout of `schema`.
    """
    keep = [
        f"CAST({int(lsn)} AS BIGINT) AS lsn",
        "-1 - monotonically_increasing_id() AS ordinal",
        "CAST(NULL AS TIMESTAMP) AS commit_ts",
        "'S' AS op",
    ]
    return type_columns(copied, schema, schema.copied_text, keep)


def fold_bag(changes: DataFrame, fold: Fold, stored: DataFrame | None) -> DataFrame:
    """Fold raw changes to rows to be added to the table and rows to be deleted from it.

    Columns: `value_0` ..., `rescued`, `lsn`, `ordinal`, `commit_ts`, `is_content`: a deletion has
    only the position of its row. A deletion without a row raises `MISSING_ROW` during execution.

    Args:
        stored: the rows of the table; None if the table was empty before the range.
    """
    keep = ["commit_lsn AS lsn", "ordinal", "commit_ts", "is_content"]
    rows = type_columns(build_bag(changes, fold), fold.schema, lambda i: f"tuple[{i}]", keep)
    values = [f"value_{i}" for i in range(len(fold.schema.fields))]
    if not fold.stats.old_kinds:
        return rows.select(*values, *_COLUMNS)
    order = "OVER (PARTITION BY content ORDER BY lsn, ordinal, is_content ROWS BETWEEN"
    stacks = (
        rows.selectExpr("*", f"{contents_sql(fold.schema)} AS content")
        .selectExpr(
            "*",
            f"sum(IF(is_content, 1, -1)) {order} UNBOUNDED PRECEDING AND CURRENT ROW) AS height",
        )
        .selectExpr("*", f"min(height) {order} CURRENT ROW AND UNBOUNDED FOLLOWING) AS lowest")
    )
    added = stacks.where("is_content AND lowest >= height").select(*values, *_COLUMNS)
    wanted = stacks.groupBy("content").agg(F.expr("-min(height) AS wanted")).where("wanted > 0")
    removed = _removed(wanted, stored, fold.schema)
    types = [field.type.ddl for field in fold.schema.fields]
    nothing = [f"CAST(NULL AS {ddl}) AS value_{i}" for i, ddl in enumerate(types)]
    return added.unionByName(
        removed.selectExpr(
            *nothing,
            "CAST(NULL AS MAP<STRING, STRING>) AS rescued",
            "lsn",
            "ordinal",
            "CAST(NULL AS TIMESTAMP) AS commit_ts",
            "false AS is_content",
        )
    )


def merge_sql(path: str, schema: TableSchema) -> str:
    """Write the MERGE statement. For a table with columns `a` and `b` it is

    MERGE INTO delta.`/lake/shop/scd1/public/t` t USING pgcdc_source s
    ON NOT s.is_content AND t._lsn = s.lsn AND t._ordinal = s.ordinal
    WHEN MATCHED THEN DELETE
    WHEN NOT MATCHED AND s.is_content THEN INSERT (`a`, `b`, _lsn, ...)
        VALUES (s.value_0, s.value_1, s.lsn, ...)
    """
    return (
        f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s\n"
        "ON NOT s.is_content AND t._lsn = s.lsn AND t._ordinal = s.ordinal\n"
        "WHEN MATCHED THEN DELETE\n"
        f"WHEN NOT MATCHED AND s.is_content THEN {insert_sql(values_by_name(schema))}"
    )


def logged_changes(changes: DataFrame, fold: Fold) -> DataFrame:
    """Return each raw change as a row: the new row, or the old row of a delete."""
    row = (
        f"CASE op WHEN 'T' THEN NULL WHEN 'D' THEN {fold.old_tuple_in_newest_layout()} "
        f"ELSE {fold.tuple_in_newest_layout()} END AS tuple"
    )
    events = changes.where("op IN ('I', 'U', 'D', 'T')").selectExpr(
        "commit_lsn AS lsn", "ordinal", "commit_ts", "op", row
    )
    keep = ["lsn", "ordinal", "commit_ts", "op"]
    return type_columns(events, fold.schema, lambda i: f"tuple[{i}]", keep)


def _removed(wanted: DataFrame, stored: DataFrame | None, schema: TableSchema) -> DataFrame:
    """Choose the newest rows of each content, as many as the changes removed."""
    error = f"raise_error({string(MISSING_ROW)})"
    if stored is None:
        return wanted.selectExpr(f"CAST({error} AS BIGINT) AS lsn", "0L AS ordinal")
    there = stored.selectExpr(
        *(f"{identifier(field.name)} AS value_{i}" for i, field in enumerate(schema.fields)),
        "_rescued AS rescued",
        LSN,
        ORDINAL,
    ).selectExpr(f"{contents_sql(schema)} AS stored_content", LSN, ORDINAL)
    found = wanted.join(there, on=F.expr("content = stored_content"), how="left")
    age = "row_number() OVER (PARTITION BY content ORDER BY _lsn DESC, _ordinal DESC) AS age"
    return (
        found.selectExpr("*", age, "count(_lsn) OVER (PARTITION BY content) AS available")
        .where("age <= wanted")
        .selectExpr(
            f"IF(available < wanted, CAST({error} AS BIGINT), _lsn) AS lsn", "_ordinal AS ordinal"
        )
    )
