"""The kinds of SCD1 table that a source table without a key can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pgcdc_assets.errors import ReplicaIdentityError
from pgcdc_assets.merge.change_stats import ChangeFacts
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.schema import CHANGE_LOG_COLUMNS, SystemColumns
from pgcdc_assets.merge.kinds import bags
from pgcdc_assets.merge.kinds.base import Counts, Kind, rows_in
from pgcdc_assets.merge.read import read_changes, read_copy, shape_of_changes
from pgcdc_assets.merge.task import TableWork
from pgcdc_assets.merge.write import append, create_or_replace, replace_contents, run_merge
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.state import TargetState


@dataclass(frozen=True)
class Bag(Kind):
    """Writes the rows that there are, each as often as the source has it."""

    def apply_copy(self, state: TargetState | None, copy: Copy, step: Step) -> Counts:
        """Replace the contents."""
        shape = self.shape_of_copy(copy)
        rows = bags.copied_rows(read_copy(self.spark, self.zone, copy), shape, copy.snapshot_lsn)
        self.replace_table(state, rows, shape, step)
        return Counts(copy.row_count, 0, rows_in(state), shape.may_rescue)

    def apply_changes(self, state: TargetState | None, step: Step) -> Counts:
        """Add the rows that stay, and remove as many as were taken out of the table."""
        work, facts = self.work, self.work.facts
        assert facts is not None and state is not None
        if not work.version_order:
            return self.empty(state, step)
        _check_whole_rows(work, facts)
        shape = shape_of_changes(work, state, self.system)
        step = self.follow_columns(state, shape, step)
        fold = Fold(shape, facts)
        changes = read_changes(self.spark, self.zone, work)
        if state.is_empty or facts.truncates:
            rows = bags.fold_bag(changes, fold, None)
            replace_contents(work.path, rows, shape, step)
            return Counts(None, 0, rows_in(state), shape.may_rescue)
        if not facts.old_kinds:
            append(work.path, bags.fold_bag(changes, fold, None), shape, step)
            return Counts(None, may_be_rescued=shape.may_rescue)
        rows = bags.fold_bag(changes, fold, self.read_table())
        statement = bags.merge_statement(work.path, shape)
        return Counts(*run_merge(self.spark, rows, statement, step), shape.may_rescue)


@dataclass(frozen=True)
class ChangeLog(Kind):
    """Appends every change as a row."""

    system: ClassVar[SystemColumns] = CHANGE_LOG_COLUMNS
    holds_row: ClassVar[str] = "t._op <> 'T'"

    def apply_copy(self, state: TargetState | None, copy: Copy, step: Step) -> Counts:
        """Add the copied rows; what was logged before stays."""
        work, shape = self.work, self.shape_of_copy(copy)
        rows = bags.copied_rows(read_copy(self.spark, self.zone, copy), shape, copy.snapshot_lsn)
        if state is None:
            create_or_replace(work.path, rows, shape, step, begins_with=copy.position)
        else:
            step = self.follow_relation(state, shape, step)
            append(work.path, rows, shape, step)
        return Counts(copy.row_count, may_be_rescued=shape.may_rescue)

    def apply_changes(self, state: TargetState | None, step: Step) -> Counts:
        """Add the changes."""
        work, facts = self.work, self.work.facts
        assert facts is not None and state is not None
        if work.version_order:
            _check_whole_rows(work, facts)
        shape = shape_of_changes(work, state, self.system)
        step = self.follow_columns(state, shape, step)
        changes = read_changes(self.spark, self.zone, work, keeps_truncated=True)
        rows = bags.logged_changes(changes, Fold(shape, facts))
        append(work.path, rows, shape, step)
        return Counts(None, may_be_rescued=shape.may_rescue)


def _check_whole_rows(work: TableWork, facts: ChangeFacts) -> None:
    """Check that updates and deletes say which rows they mean.

    Raises:
        ReplicaIdentityError: some came while the replica identity was not FULL.
    """
    if facts.old_kinds - {"O"}:
        raise ReplicaIdentityError(
            relation=work.plan.target.qualified_name,
            identity="other than FULL",
            reason="updates or deletes came without their whole old rows, and without a key "
            "nothing else says which rows they mean",
            remedy="ALTER TABLE ... REPLICA IDENTITY FULL; then copy the table anew",
        )
