"""The base of the kinds of table that keep the past: a later snapshot adds its differences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pyspark.sql import DataFrame

from pgcdc_assets.merge.change_stats import ChangeStats, Truncation
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.key_range import KeyRange
from pgcdc_assets.merge.fold.typed_columns import SnapshotRows, type_columns
from pgcdc_assets.merge.fold.versions import AffectedRows, find_affected_rows, stored_rows
from pgcdc_assets.merge.kinds.base import Counts, TableKind, is_large
from pgcdc_assets.merge.kinds.changed_key import find_new_key
from pgcdc_assets.merge.read import read_changes, read_past
from pgcdc_assets.merge.schema_evolution import set_property
from pgcdc_assets.merge.write import alter_all, append, compute_once, run_merge
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.spark.sql import timestamp
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.properties import KEY_SINCE
from pgcdc_assets.tables.state import ScdState


@dataclass(frozen=True)
class AccumulatingTable(TableKind):
    """The writer of a table to which a later snapshot adds its differences, such as a history."""

    shows_the_past: ClassVar[bool] = True

    @abstractmethod
    def write_first_snapshot(self, copied: SnapshotRows, step: Step) -> None:
        """Create the table from a snapshot."""

    @abstractmethod
    def read_stored(self) -> DataFrame:
        """Read the rows that changes can end or change."""

    @abstractmethod
    def end_rows_without_key(
        self, key: Sequence[str | None], copied: SnapshotRows, step: Step
    ) -> None:
        """End the rows that the columns of a new key do not identify.

        Args:
            key: the present names of these columns in the table; None for a missing column.
        """

    @abstractmethod
    def snapshot_events(self, copied: SnapshotRows, stored: DataFrame | None) -> DataFrame:
        """Write a snapshot as events."""

    @abstractmethod
    def changed_events(self, touched: AffectedRows) -> DataFrame:
        """Return changes as events with typed values."""

    @abstractmethod
    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find the rows that events add, and the rows that events end or change."""

    @abstractmethod
    def merge_sql(self, fold: Fold, key_range: KeyRange | None) -> str:
        """Return the MERGE statement of an outcome."""

    @abstractmethod
    def truncation_sql(self, truncate: Truncation) -> str:
        """Return the clause of the MERGE for the rows that a TRUNCATE removed."""

    def apply_snapshot(self, state: ScdState | None, snapshot: Snapshot, step: Step) -> Counts:
        """Create the table from the snapshot, or add the differences to the table."""
        at = self.task.snapshot_at
        assert at is not None
        if state is not None:
            step = self.add_system_columns(state, step)
            state = self.read_state()
        schema = self.build_snapshot_schema(state)
        lsn = snapshot.snapshot_lsn
        rows = self.read_snapshot(snapshot, schema)
        copied = SnapshotRows(rows, schema, lsn, at, snapshot.key, self.task.table_end)
        if state is None:
            self.write_first_snapshot(copied, step)
            return Counts(snapshot.row_count, may_be_rescued=schema.may_rescue)
        state, step = self._follow_key(state, copied, step)
        state, step = self.follow_relation(state, schema, step)
        stored = None if state.is_empty else self.read_stored()
        events = self.snapshot_events(copied, stored)
        return self._write(state, events, stored, Fold(schema, ChangeStats()), step)

    def apply_changes(self, state: ScdState | None, step: Step) -> Counts:
        """Find the rows that the changes add, end and change, and write them."""
        task, stats = self.task, self.task.stats
        assert stats is not None and state is not None
        step = self.add_system_columns(state, step)
        if not task.version_order:
            clause = self.truncation_sql(stats.truncates[0])
            altered = alter_all(self.spark, task.path, clause, step)
            return Counts(updated=altered)
        schema = self.build_changes_schema(state)
        state, step = self.follow_columns(state, schema, step)
        fold = Fold(schema, stats)
        changes = read_changes(self.spark, self.zone, task, keeps_truncated=True)
        stored = None if state.is_empty else self.read_stored()
        touched = find_affected_rows(changes, stored, fold, is_large=is_large(state))
        written = self.write_range(state, touched, step)
        if written is not None:
            return written
        if is_large(state):
            touched = touched.computed()
        events = self.changed_events(touched)
        return self._write(state, events, touched.stored, fold, step, touched.key_range)

    def _follow_key(
        self, state: ScdState, copied: SnapshotRows, step: Step
    ) -> tuple[ScdState, Step]:
        """End the rows that cannot be compared with a snapshot, because its key is another one."""
        columns = read_past(self.task, state, self._find_version(copied.schema))
        key = find_new_key(state, columns, copied.schema)
        if key is None or state.is_empty:
            return state, step
        set_property(self.spark, state.path, KEY_SINCE, copied.key)
        ending = step.keeping(state.watermark)
        self.end_rows_without_key(key, copied, ending)
        step = self.follow_write(ending, step)
        return self.read_state(), step

    def add_system_columns(self, state: ScdState, step: Step) -> Step:
        """Add system columns of later releases, if any are missing; return the step for rows."""
        return step

    def write_range(self, state: ScdState, touched: AffectedRows, step: Step) -> Counts | None:
        """Rewrite the affected range of keys; return None if a MERGE is better."""
        return None

    def _write(
        self,
        state: ScdState,
        events: DataFrame,
        stored: DataFrame | None,
        fold: Fold,
        step: Step,
        key_range: KeyRange | None = None,
    ) -> Counts:
        rows = self.outcome(events, stored, fold)
        if stored is None:
            append(self.task.path, rows, fold.schema, step)
            return Counts(None, may_be_rescued=fold.schema.may_rescue)
        computes_once = is_large(state)
        if computes_once:
            rows = compute_once(rows)
        statement = self.merge_sql(fold, key_range)
        inserted, updated, _ = run_merge(
            self.spark, rows, statement, step, is_computed=computes_once
        )
        return Counts(inserted, updated, may_be_rescued=fold.schema.may_rescue)


def snapshot_events(
    copied: SnapshotRows, current: DataFrame | None, *, began_later: str = "false"
) -> DataFrame:
    """Write a snapshot as events at its LSN: what it holds has come, what it does not hold has
    gone. The rows of a table that was replaced by another one have gone before.

    Args:
        current: all current rows of the table.
        began_later: SQL over `current` of whether a row began after the replaced table ended.
    """
    fold = Fold(copied.schema, ChangeStats())
    position = [
        f"CAST({int(copied.lsn)} AS BIGINT) AS lsn",
        "CAST(-1 AS BIGINT) AS ordinal",
        f"{timestamp(copied.at)} AS commit_ts",
        "'S' AS op",
    ]
    keep = [
        *fold.key_values(lambda i: f"new[{i}]"),
        *position,
        "true AS is_content",
    ]
    rows = type_columns(copied.frame, copied.schema, copied.schema.copied_text, keep)
    if current is None:
        return rows
    there = stored_rows(current, fold, f"{began_later} AS began_later")
    replaced = {"lsn", "ordinal", "commit_ts", "op", "is_content", "began_later"}
    values = [name for name in there.columns if name not in replaced]
    if copied.end is not None:
        end, at = int(copied.end.lsn), timestamp(copied.end.at)
        position[0] = f"CAST(IF(began_later, {int(copied.lsn)}, {end}) AS BIGINT) AS lsn"
        ended_at = f"greatest(commit_ts, {at})"
        position[2] = f"IF(began_later, {timestamp(copied.at)}, {ended_at}) AS commit_ts"
    return rows.unionByName(there.selectExpr(*values, *position, "false AS is_content"))
