"""SCD type 1: one row per key, the current image.

A snapshot replaces the contents. Changes are folded to one row per key and applied by one MERGE. If
the table is empty, or a TRUNCATE in the range emptied it, the rows are written without a MERGE.
Each way makes one Delta commit that carries fence and watermark, so Delta skips a repeat as a
duplicate transaction.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pgcdc_assets.merge.fold.events import Fold, build_bag, build_events
from pgcdc_assets.merge.fold.key_range import KeyRange, find_key_range, match_sql
from pgcdc_assets.merge.fold.latest import keep_bag_remainder, keep_newest_per_key
from pgcdc_assets.merge.fold.toast import (
    fetch_unknown,
    follow_key_changes,
    joined_rescued_sql,
    value_or_error_sql,
    with_known_values,
)
from pgcdc_assets.merge.fold.typed_columns import type_columns, type_snapshot_rows
from pgcdc_assets.merge.fold.versions import stored_rows
from pgcdc_assets.merge.kinds.base import Counts, TableKind, is_large, rows_in
from pgcdc_assets.merge.read import read_changes
from pgcdc_assets.merge.write import (
    NEWER,
    SOURCE_VIEW,
    compute_once,
    insert_sql,
    name_columns,
    overwrite,
    replace_contents,
    run_merge,
)
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.spark.parquet import read_parquet
from pgcdc_assets.spark.sql import delta_table, identifier
from pgcdc_assets.spark.tuning import is_tiny
from pgcdc_assets.tables.columns import COMMIT_TS, LSN, ORDINAL, RESCUED
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.properties import MAPPING
from pgcdc_assets.tables.state import ScdState, check_written, read_scd_state


def fold_changes(changes: DataFrame, fold: Fold, stored: DataFrame | None) -> DataFrame:
    """Fold raw changes to one row per key, the last one.

    Columns: `key_0` ..., `value_0` ..., `rescued`, `lsn`, `ordinal`, `commit_ts`, `is_content` and,
    where a change left a value out, `unknown`: fields to be taken from the row of the table.

    Args:
        stored: the rows of the table; None if the table was empty before the range.
    """
    keep = [*fold.key_columns, "commit_lsn AS lsn", "ordinal", "commit_ts", "is_content"]
    if not fold.unknown:
        if fold.stats.is_full:
            latest = keep_bag_remainder(build_bag(changes, fold), fold)
        else:
            latest = keep_newest_per_key(build_events(changes, fold), fold)
        return type_columns(latest, fold.schema, lambda i: f"tuple[{i}]", keep)
    events = with_known_values(build_events(changes, fold), fold)
    latest = follow_key_changes(keep_newest_per_key(events, fold), events, fold)
    origin = fold.named("origin", "origin_rescued")
    rows = type_columns(
        latest, fold.schema, fold.known_text, [*keep, "unknown", "is_elsewhere", *origin]
    )
    if stored is None or not fold.stats.has_old_tuples:
        return rows
    return fetch_unknown(rows, fold, stored, LSN)


def rows_alone(rows: DataFrame, fold: Fold) -> DataFrame:
    """Turn folded rows into the whole contents of a table, without rows to take values from."""
    rows = rows.where("is_content")
    if fold.unknown:
        width = range(len(fold.schema.fields))
        others = [n for n in rows.columns if n not in {f"value_{i}" for i in fold.unknown}]
        known = [f"{value_or_error_sql(fold, i, '')} AS value_{i}" for i in fold.unknown]
        rows = rows.selectExpr(*others, *known).select(
            *(f"value_{i}" for i in width), "rescued", "lsn", "ordinal", "commit_ts"
        )
    return rows


def merge_rows(
    spark: SparkSession,
    path: str,
    rows: DataFrame,
    fold: Fold,
    step: Step,
    *,
    is_large: bool,
) -> tuple[int, int, int]:
    """Apply folded rows by one MERGE; return the counts of inserted, updated and deleted rows.

    Args:
        is_large: look for the affected range of keys first.
    """
    if not is_large:
        return run_merge(spark, rows, merge_sql(path, fold), step)
    rows = compute_once(rows)
    statement = merge_sql(path, fold, find_key_range(rows, fold))
    return run_merge(spark, rows, statement, step, is_computed=True)


def merge_sql(path: str, fold: Fold, key_range: KeyRange | None = None) -> str:
    """Write the MERGE statement. For a table with columns `id` (the key) and `n` it is

        MERGE INTO delta.`/lake/shop/scd1/public/t` t USING pgcdc_source s ON t.`id` = s.key_0
        WHEN MATCHED AND (t._lsn IS NULL OR s.lsn > t._lsn OR ...) AND NOT s.is_content THEN DELETE
        WHEN MATCHED AND (t._lsn IS NULL OR s.lsn > t._lsn OR ...) THEN UPDATE SET
            t.`id` = s.value_0, t.`n` = s.value_1, t._lsn = s.lsn, ...
        WHEN NOT MATCHED AND s.is_content THEN INSERT (`id`, `n`, _lsn, ...)
            VALUES (s.value_0, s.value_1, s.lsn, ...)

    If a change leaves `n` out, `n` becomes IF(coalesce(array_contains(s.unknown, 1), false), t.`n`,
    s.value_1).

    Args:
        key_range: a part of the table that contains every row to be matched.
    """
    fields = fold.schema.fields
    updates = []
    inserts = []
    for i, field in enumerate(fields):
        name = identifier(field.name)
        mine = f"s.value_{i}"
        if i in fold.unknown:
            mine = f"IF(coalesce(array_contains(s.unknown, {i}), false), t.{name}, s.value_{i})"
        updates.append(f"t.{name} = {mine}")
        inserts.append((name, value_or_error_sql(fold, i, "s.")))
    rescued = "s.rescued"
    if fold.unknown:
        rescued = f"IF(s.unknown IS NULL, s.rescued, {joined_rescued_sql(fold)})"
    system = {LSN: "s.lsn", ORDINAL: "s.ordinal", COMMIT_TS: "s.commit_ts"}
    updates += [f"t.{name} = {value}" for name, value in system.items()]
    updates.append(f"t._rescued = {rescued}")
    inserts += [*system.items(), (RESCUED, "s.rescued")]
    return (
        f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s ON {match_sql(fold, key_range)}\n"
        f"WHEN MATCHED AND {NEWER} AND NOT s.is_content THEN DELETE\n"
        f"WHEN MATCHED AND {NEWER} THEN UPDATE SET {', '.join(updates)}\n"
        f"WHEN NOT MATCHED AND s.is_content THEN {insert_sql(inserts)}"
    )


def read_files(spark: SparkSession, state: ScdState) -> DataFrame:
    """Read a table as its log describes it.

    If possible, Spark reads the files directly, because Delta needs a job to find them. Delta reads
    tables with deletion vectors, mapped names or files of another table.
    """
    names = state.files.column("path").to_pylist()
    is_plain = not state.has_deletion_vectors and not any(set("/:%") & set(n) for n in names)
    if not names or not is_plain or MAPPING in state.properties:
        return spark.read.format("delta").load(state.path)
    schema = StructType.fromJson(json.loads(state.schema))
    return read_parquet(spark, (f"{state.path}/{name}" for name in names), schema)


@dataclass(frozen=True)
class WholeTable:
    """Rows that replace all rows of a table.

    Attributes:
        rows: with the columns of the table.
        counted: after the write, the numbers of inserted, updated and deleted rows.
    """

    rows: DataFrame
    counted: Observation

    @classmethod
    def of(cls, rows: DataFrame, stored: DataFrame, fold: Fold) -> WholeTable:
        """Replace rows of the table by folded rows with the same keys.

        Args:
            rows: without unknown fields.
            stored: all rows of the table; no key is NULL.
        """
        values = [*(f"value_{i}" for i in range(len(fold.schema.fields))), "rescued"]
        names = [*fold.key_columns, *values, "lsn", "ordinal", "commit_ts", "is_content"]
        both = rows.selectExpr(*names, "false AS is_stored").unionAll(
            stored_rows(stored, fold).selectExpr(*names, "true AS is_stored")
        )
        of_key = f"OVER (PARTITION BY {', '.join(fold.key_columns)})"
        at = "struct(lsn, ordinal)"
        # A row without a newer change stays, even if its key is there twice: the checks report
        # duplicate keys.
        is_kept = (
            f"IF(is_stored, change IS NULL OR change <= {at}, "
            "IF(there IS NULL, is_content, change > there))"
        )
        rows = both.selectExpr(
            "*",
            f"max(IF(is_stored, NULL, {at})) {of_key} AS change",
            f"max(IF(is_stored, {at}, NULL)) {of_key} AS there",
        ).where(is_kept)
        counted = Observation()
        changed = {
            "inserted": "NOT is_stored AND there IS NULL",
            "updated": "NOT is_stored AND there IS NOT NULL AND is_content",
            "deleted": "NOT is_content",
        }
        counts = [F.expr(f"count_if({which})").alias(name) for name, which in changed.items()]
        kept = rows.observe(counted, *counts).where("is_content")
        return cls(kept.select(*name_columns(fold.schema)), counted)

    def write(self, path: str, step: Step) -> None:
        """Write the rows in one commit."""
        overwrite(self.rows, path, step)

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of inserted, updated and deleted rows.

        Call it after a check of the commit. If Delta skips the write as a duplicate transaction,
        the counts never arrive, and an embedded session waits without a limit.
        """
        found = self.counted.get
        return int(found["inserted"]), int(found["updated"]), int(found["deleted"])


@dataclass(frozen=True)
class CurrentImage(TableKind):
    """The writer of a current image."""

    @property
    def merges_snapshot_with_changes(self) -> bool:
        """Whether one commit writes an empty snapshot together with the changes after it."""
        snapshot = self.task.plan.snapshot
        return snapshot is not None and snapshot.row_count == 0 and bool(self.task.version_order)

    def apply_snapshot(self, state: ScdState | None, snapshot: Snapshot, step: Step) -> Counts:
        """Replace the contents."""
        schema = self.build_snapshot_schema()
        copied = self.read_snapshot(snapshot, schema)
        rows = type_snapshot_rows(copied, schema, snapshot.snapshot_lsn)
        self.replace_table(state, rows, schema, step)
        return Counts(snapshot.row_count, 0, rows_in(state), schema.may_rescue)

    def apply_changes(self, state: ScdState | None, step: Step) -> Counts:
        """Fold the changes to one row per key, and merge the rows."""
        task, stats = self.task, self.task.stats
        assert stats is not None
        before = rows_in(state)
        if not task.version_order:
            return self.empty(state, step)
        makes_table = self.merges_snapshot_with_changes
        schema = self.build_changes_schema(None if makes_table else state)
        fold = Fold(schema, stats)
        changes = read_changes(self.spark, self.zone, task)
        if makes_table:
            rows = rows_alone(fold_changes(changes, fold, None), fold)
            self.replace_table(state, rows, schema, step)
            return Counts(None, 0, before, schema.may_rescue)
        assert state is not None
        state, step = self.follow_columns(state, schema, step)
        if state.is_empty or stats.truncates:
            rows = rows_alone(fold_changes(changes, fold, None), fold)
            replace_contents(task.path, rows, schema, step)
            return Counts(None, 0, before, schema.may_rescue)
        stored = self.read_table()
        rows = fold_changes(changes, fold, stored)
        if self._prefers_rewrite(state, fold):
            return Counts(*self._rewrite(rows, step, fold), schema.may_rescue)
        merged = merge_rows(self.spark, task.path, rows, fold, step, is_large=is_large(state))
        return Counts(*merged, schema.may_rescue)

    def _prefers_rewrite(self, state: ScdState, fold: Fold) -> bool:
        """Return whether a rewrite of all rows is cheaper than a MERGE, and equivalent."""
        return (
            is_tiny(fold.stats.change_count, state.size_bytes, self.task.plan.change_bytes)
            and not fold.unknown
            # A MERGE never matches NULL. The columns of an index identity are NOT NULL; under FULL,
            # a configured key may contain NULL.
            and not (self.task.plan.target.key and fold.schema.relation.has_full_identity)
            and self.may_rewrite(state, fold.schema)
        )

    def _rewrite(self, rows: DataFrame, step: Step, fold: Fold) -> tuple[int, int, int]:
        path = self.task.path
        # The state was read before the first tables of the run were merged.
        newest = read_scd_state(self.zone.lake, self.zone.name, path)
        assert newest is not None
        whole = WholeTable.of(rows, read_files(self.spark, newest), fold)
        whole.write(path, step)
        check_written(self.zone, path, step)
        return whole.counts()
