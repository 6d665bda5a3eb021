"""The kinds of SCD table in which what is gone from the source stays: history, and soft deletes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from pyspark.sql import DataFrame

from pgcdc_assets.merge.change_stats import ChangeFacts, Truncate
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.key_range import Bounds
from pgcdc_assets.merge.fold.typed_columns import CopiedRows, typed
from pgcdc_assets.merge.fold.versions import (
    Touched,
    find_touched,
    stored_rows,
)
from pgcdc_assets.merge.kinds.base import Counts, Kind, is_large
from pgcdc_assets.merge.read import read_changes, shape_of_changes
from pgcdc_assets.merge.write import alter_all, append, compute_once, run_merge
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.spark.sql import timestamp
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.state import TargetState


@dataclass(frozen=True)
class Lasting(Kind):
    """Writes a table that a later copy adds to, as the difference to what is there."""

    @abstractmethod
    def write_first_copy(self, copied: CopiedRows, step: Step) -> None:
        """Make the table of a copy."""

    @abstractmethod
    def read_stored(self) -> DataFrame:
        """Read the rows that changes can end or alter."""

    @abstractmethod
    def copied_events(self, copied: CopiedRows, stored: DataFrame | None) -> DataFrame:
        """Write a copy as events."""

    @abstractmethod
    def changed_events(self, touched: Touched) -> DataFrame:
        """Give changes as events with their values."""

    @abstractmethod
    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find the rows that events add to the table, and those of it that they end or alter."""

    @abstractmethod
    def statement(self, fold: Fold, bounds: Bounds | None) -> str:
        """Write the MERGE of an outcome."""

    @abstractmethod
    def truncating(self, truncate: Truncate) -> str:
        """Write the MERGE's clause for the rows that a TRUNCATE took away."""

    def apply_copy(self, state: TargetState | None, copy: Copy, step: Step) -> Counts:
        """Begin with the copy, or add what it says differently."""
        at = self.work.copied_at
        assert at is not None
        shape = self.shape_of_copy(copy)
        lsn = copy.snapshot_lsn
        rows = self.read_copy(copy, shape)
        copied = CopiedRows(rows, shape, lsn, at, copy.position)
        if state is None:
            self.write_first_copy(copied, step)
            return Counts(copy.row_count, may_be_rescued=shape.may_rescue)
        step = self.follow_relation(state, shape, self.add_system_columns(state, step))
        stored = None if state.is_empty else self.read_stored()
        events = self.copied_events(copied, stored)
        return self._write(state, events, stored, Fold(shape, ChangeFacts()), step)

    def apply_changes(self, state: TargetState | None, step: Step) -> Counts:
        """Find what the changes add, end and alter, and write that."""
        work, facts = self.work, self.work.facts
        assert facts is not None and state is not None
        step = self.add_system_columns(state, step)
        if not work.version_order:
            clause = self.truncating(facts.truncates[0])
            altered = alter_all(self.spark, work.path, clause, step)
            return Counts(updated=altered)
        shape = shape_of_changes(work, state, self.system)
        step = self.follow_columns(state, shape, step)
        fold = Fold(shape, facts)
        changes = read_changes(self.spark, self.zone, work, keeps_truncated=True)
        stored = None if state.is_empty else self.read_stored()
        touched = find_touched(changes, stored, fold, is_large=is_large(state))
        written = self.write_range(state, touched, step)
        if written is not None:
            return written
        if is_large(state):
            touched = touched.computed()
        events = self.changed_events(touched)
        return self._write(state, events, touched.stored, fold, step, touched.bounds)

    def add_system_columns(self, state: TargetState, step: Step) -> Step:
        """Add columns of ours that a table of an earlier release lacks; give the step for rows."""
        return step

    def write_range(self, state: TargetState, touched: Touched, step: Step) -> Counts | None:
        """Write the range that changes touch anew; None where a MERGE is better."""
        return None

    def _write(
        self,
        state: TargetState,
        events: DataFrame,
        stored: DataFrame | None,
        fold: Fold,
        step: Step,
        bounds: Bounds | None = None,
    ) -> Counts:
        rows = self.outcome(events, stored, fold)
        if stored is None:
            append(self.work.path, rows, fold.shape, step)
            return Counts(None, may_be_rescued=fold.shape.may_rescue)
        computes_once = is_large(state)
        if computes_once:
            rows = compute_once(rows)
        statement = self.statement(fold, bounds)
        inserted, updated, _ = run_merge(
            self.spark, rows, statement, step, is_computed=computes_once
        )
        return Counts(inserted, updated, may_be_rescued=fold.shape.may_rescue)


def copied_events(copied: CopiedRows, current: DataFrame | None) -> DataFrame:
    """Write a copy as events at its LSN: what it holds has come, what it does not hold has gone.

    Args:
        current: all current rows of the table.
    """
    fold = Fold(copied.shape, ChangeFacts())
    position = [
        f"CAST({int(copied.lsn)} AS BIGINT) AS lsn",
        "CAST(-1 AS BIGINT) AS ordinal",
        f"{timestamp(copied.at)} AS commit_ts",
        "'S' AS op",
    ]
    keep = [*fold.key_values("k", "r", lambda i: f"new[{i}]"), *position, "true AS is_content"]
    rows = typed(copied.frame, copied.shape, lambda i: f"new[{i}]", keep)
    if current is None:
        return rows
    there = stored_rows(current, fold)
    replaced = {"lsn", "ordinal", "commit_ts", "op", "is_content"}
    values = [name for name in there.columns if name not in replaced]
    return rows.unionByName(there.selectExpr(*values, *position, "false AS is_content"))
