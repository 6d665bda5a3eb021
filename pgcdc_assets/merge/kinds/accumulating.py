"""The kinds of SCD table in which what is gone from the source stays: history, and soft deletes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge.change_stats import ChangeFacts, Truncate
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.key_range import Bounds
from pgcdc_assets.merge.fold.schema import (
    EPOCH_COLUMNS,
    SCD2_COLUMNS,
    SOFT_DELETE_COLUMNS,
    SystemColumns,
    TableShape,
)
from pgcdc_assets.merge.fold.typed_columns import CopiedRows
from pgcdc_assets.merge.fold.versions import Touched, build_versions, find_touched, typed_events
from pgcdc_assets.merge.kinds import current_image as scd1
from pgcdc_assets.merge.kinds import history as scd2
from pgcdc_assets.merge.kinds import soft_deletes
from pgcdc_assets.merge.kinds.base import Counts, Kind, is_large
from pgcdc_assets.merge.kinds.epoch_columns import add_epochs
from pgcdc_assets.merge.read import read_changes, shape_of_changes
from pgcdc_assets.merge.task import TableWork
from pgcdc_assets.merge.write import alter_all, append, compute_once, create_or_replace, run_merge
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.state import TargetState, check_written

# A range is written anew when it has at most so many current versions for each change. Measured up
# to ten, where it takes as long as a MERGE; but what is written must follow what is changed.
REPLACED_PER_CHANGE = 4

_IS_CURRENT = "partition._is_current"


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


@dataclass(frozen=True)
class SoftDeletes(Lasting):
    """Writes the current image and keeps deleted rows in it."""

    system: ClassVar[SystemColumns] = SOFT_DELETE_COLUMNS

    def write_first_copy(self, copied: CopiedRows, step: Step) -> None:
        """Make the table of a copy."""
        rows = scd1.copied_rows(copied.frame, copied.shape, copied.lsn)
        path, shape = self.work.path, copied.shape
        create_or_replace(path, rows, shape, step, begins_with=copied.position)

    def read_stored(self) -> DataFrame:
        """Read all rows: a deleted one may come back."""
        return self.read_table()

    def copied_events(self, copied: CopiedRows, stored: DataFrame | None) -> DataFrame:
        """Write a copy as events."""
        return soft_deletes.copied_events(copied, stored)

    def changed_events(self, touched: Touched) -> DataFrame:
        """Give changes as events with their values."""
        return soft_deletes.changed_events(touched)

    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find what each key last held."""
        return soft_deletes.last_contents(events, stored, fold)

    def statement(self, fold: Fold, bounds: Bounds | None) -> str:
        """Write the MERGE of an outcome."""
        return soft_deletes.merge_statement(self.work.path, fold, bounds)

    def truncating(self, truncate: Truncate) -> str:
        """Write the MERGE's clause that marks them."""
        return soft_deletes.emptying(truncate)


@dataclass(frozen=True)
class History(Lasting):
    """Writes the history."""

    system: ClassVar[SystemColumns] = SCD2_COLUMNS
    partitioned_by: ClassVar[tuple[str, ...]] = scd2.PARTITIONED_BY

    def write_first_copy(self, copied: CopiedRows, step: Step) -> None:
        """Make the table of a copy."""
        scd2.write_first_copy(self.work.path, copied, self.work.plan.epoch, step)

    def add_system_columns(self, state: TargetState, step: Step) -> Step:
        """Add the epochs of LSNs."""
        if set(EPOCH_COLUMNS) <= set(state.columns):
            return step
        rewrite = step.keeping(state.watermark)
        add_epochs(self.spark, self.zone, self.work.path, self.work.name, rewrite)
        return self.follow_write(rewrite, step)

    def read_stored(self) -> DataFrame:
        """Read the current versions: the others have ended for good."""
        return scd2.current_rows(self.spark, self.work.path)

    def copied_events(self, copied: CopiedRows, stored: DataFrame | None) -> DataFrame:
        """Write a copy as events."""
        return scd2.copied_events(copied, stored)

    def changed_events(self, touched: Touched) -> DataFrame:
        """Give changes as events with their values."""
        return typed_events(touched.events, touched.fold, touched.rows, touched.stored)

    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find the versions that begin, and those that end."""
        return self._versions(events, stored, fold).where("is_touched")

    def _versions(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        tracked = _tracked(self.work, fold.shape)
        return build_versions(events, stored, fold, tracked, self.work.plan.epoch)

    def write_range(self, state: TargetState, touched: Touched, step: Step) -> Counts | None:
        """Write the current versions of the range anew, and add those that have ended."""
        fold = touched.fold
        if touched.bounds is None or not self._is_better_replaced(state, touched):
            return None
        versions = self._versions(self.changed_events(touched), touched.rows, fold)
        written = scd2.RangeOfVersions.of(versions, touched.bounds, fold.shape)
        written.write(self.spark, self.work.path, step)
        check_written(self.zone, self.work.path, step)
        return Counts(None, written.count_altered(), may_be_rescued=fold.shape.may_rescue)

    def _is_better_replaced(self, state: TargetState, touched: Touched) -> bool:
        """Say whether the range has few versions beside the changes, and nothing else is lost."""
        assert touched.bounds is not None and touched.rows is not None
        shape, facts, files = touched.fold.shape, touched.fold.facts, state.files
        if facts.truncates or not self.may_write_anew(state, shape):
            return False
        if _IS_CURRENT not in files.column_names:
            return False
        current = files.filter(pc.field(_IS_CURRENT))
        # Rows without a key are not told apart, and a MERGE does not touch them.
        if any(_nulls(current, name) != 0 for name in shape.key_names):
            return False
        most = REPLACED_PER_CHANGE * facts.change_count
        estimate = touched.bounds.estimate_rows(current)
        # Most often the estimate spares the count.
        return estimate is not None and estimate <= most and touched.rows.count() <= most

    def statement(self, fold: Fold, bounds: Bounds | None) -> str:
        """Write the MERGE of an outcome."""
        tracked = _tracked(self.work, fold.shape)
        return scd2.merge_statement(self.work.path, fold, tracked, bounds, self.work.plan.epoch)

    def truncating(self, truncate: Truncate) -> str:
        """Write the MERGE's clause that ends them."""
        return scd2.ending(truncate, self.work.plan.epoch)


def _tracked(work: TableWork, shape: TableShape) -> list[int] | None:
    """Find the fields whose change opens a version.

    Raises:
        ConfigurationError: a tracked column is not there.
    """
    names = work.plan.target.tracked
    if names is None:
        return None
    known = [field.name for field in shape.fields]
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigurationError(
            reason=f"Table {work.plan.target.qualified_name}: tracked column "
            f'"{missing[0]}" is not among its published columns. Mend `tracked` in its settings.'
        )
    return [known.index(name) for name in names]


def _nulls(files: pa.Table, column: str) -> int | None:
    """Count a column's NULLs by the statistics of files; None where they do not say."""
    name = f"null_count.{column}"
    if name not in files.column_names or files.column(name).null_count:
        return None
    return int(pc.sum(files.column(name)).as_py() or 0)
