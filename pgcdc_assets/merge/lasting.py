"""The kinds of SCD table in which what is gone from the source stays: history, and soft deletes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pyspark.sql import DataFrame

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import scd1, scd2, soft_deletes
from pgcdc_assets.merge.events import Fold
from pgcdc_assets.merge.evolution import add_columns
from pgcdc_assets.merge.facts import ChangeFacts, Truncate
from pgcdc_assets.merge.kind import Counts, Kind, is_large
from pgcdc_assets.merge.preparation import TableWork
from pgcdc_assets.merge.rows import CopiedRows
from pgcdc_assets.merge.shape import (
    SCD2_COLUMNS,
    SOFT_DELETE_COLUMNS,
    SystemColumns,
    TableShape,
)
from pgcdc_assets.merge.sources import read_changes, read_copy, shape_of_changes
from pgcdc_assets.merge.versions import Touched, build_versions, find_touched, typed_events
from pgcdc_assets.merge.watermark import TargetState
from pgcdc_assets.merge.writing import alter_all, append, run_merge
from pgcdc_assets.raw.snapshots import Copy


@dataclass(frozen=True)
class Lasting(Kind):
    """Writes a table that a later copy adds to, as the difference to what is there."""

    @abstractmethod
    def write_first_copy(self, copied: CopiedRows, app_id: str) -> None:
        """Make the table of a copy."""

    @abstractmethod
    def read_stored(self) -> DataFrame:
        """Read the rows that changes can end or alter."""

    @abstractmethod
    def copied_events(self, copied: CopiedRows, stored: DataFrame | None) -> DataFrame:
        """Write a copy as events."""

    @abstractmethod
    def changed_events(self, touched: Touched, fold: Fold) -> DataFrame:
        """Give changes as events with their values."""

    @abstractmethod
    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find the rows that events add to the table, and those of it that they end or alter."""

    @abstractmethod
    def statement(self, fold: Fold, bounds: str | None) -> str:
        """Write the MERGE of an outcome."""

    @abstractmethod
    def truncating(self, truncate: Truncate) -> str:
        """Write the MERGE's clause for the rows that a TRUNCATE took away."""

    def apply_copy(self, state: TargetState | None, copy: Copy) -> Counts:
        """Begin with the copy, or add what it says differently."""
        at = self.work.copied_at
        assert at is not None
        shape = self.shape_of_copy(copy)
        lsn = copy.snapshot_lsn
        copied = CopiedRows(read_copy(self.spark, self.zone, copy), shape, lsn, at)
        if state is None:
            self.write_first_copy(copied, self.zone.app_id(copy.epoch))
            return Counts(copy.row_count, may_be_rescued=shape.may_rescue)
        self.follow_relation(state, shape)
        stored = None if state.is_empty else self.read_stored()
        events = self.copied_events(copied, stored)
        return self._write(events, stored, Fold(shape, ChangeFacts()), copy.epoch, lsn)

    def apply_changes(self, state: TargetState | None) -> Counts:
        """Find what the changes add, end and alter, and merge that."""
        work, facts = self.work, self.work.facts
        assert facts is not None and state is not None
        epoch, end = work.plan.epoch, work.plan.end
        if not work.version_order:
            clause = self.truncating(facts.truncates[0])
            altered = alter_all(self.spark, work.path, clause, self.zone.app_id(epoch), end)
            return Counts(updated=altered)
        shape = shape_of_changes(work, state, self.system)
        add_columns(self.spark, work.path, state.columns, shape)
        fold = Fold(shape, facts)
        changes = read_changes(self.spark, self.zone, work, keeps_truncated=True)
        stored = None if state.is_empty else self.read_stored()
        touched = find_touched(changes, stored, fold, is_large=is_large(state))
        events = self.changed_events(touched, fold)
        return self._write(events, touched.stored, fold, epoch, end, touched.bounds)

    def _write(
        self,
        events: DataFrame,
        stored: DataFrame | None,
        fold: Fold,
        epoch: int,
        watermark: Lsn,
        bounds: str | None = None,
    ) -> Counts:
        path, app_id = self.work.path, self.zone.app_id(epoch)
        rows = self.outcome(events, stored, fold)
        if stored is None:
            append(path, rows, fold.shape, app_id, watermark)
            return Counts(None, may_be_rescued=fold.shape.may_rescue)
        statement = self.statement(fold, bounds)
        inserted, updated, _ = run_merge(self.spark, rows, statement, app_id, watermark)
        return Counts(inserted, updated, may_be_rescued=fold.shape.may_rescue)


@dataclass(frozen=True)
class SoftDeletes(Lasting):
    """Writes the current image and keeps deleted rows in it."""

    system: ClassVar[SystemColumns] = SOFT_DELETE_COLUMNS

    def write_first_copy(self, copied: CopiedRows, app_id: str) -> None:
        """Make the table of a copy."""
        scd1.write_copy(self.work.path, copied.frame, copied.shape, app_id, copied.lsn)

    def read_stored(self) -> DataFrame:
        """Read all rows: a deleted one may come back."""
        return self.read_table()

    def copied_events(self, copied: CopiedRows, stored: DataFrame | None) -> DataFrame:
        """Write a copy as events."""
        return soft_deletes.copied_events(copied, stored)

    def changed_events(self, touched: Touched, fold: Fold) -> DataFrame:
        """Give changes as events with their values."""
        return soft_deletes.changed_events(touched, fold)

    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find what each key last held."""
        return soft_deletes.last_contents(events, stored, fold)

    def statement(self, fold: Fold, bounds: str | None) -> str:
        """Write the MERGE of an outcome."""
        return soft_deletes.merge_statement(self.work.path, fold, bounds)

    def truncating(self, truncate: Truncate) -> str:
        """Write the MERGE's clause that marks them."""
        return soft_deletes.emptying(truncate)


@dataclass(frozen=True)
class History(Lasting):
    """Writes the history."""

    system: ClassVar[SystemColumns] = SCD2_COLUMNS

    def write_first_copy(self, copied: CopiedRows, app_id: str) -> None:
        """Make the table of a copy."""
        scd2.write_first_copy(self.work.path, copied, app_id)

    def read_stored(self) -> DataFrame:
        """Read the current versions: the others have ended for good."""
        return scd2.current_rows(self.spark, self.work.path)

    def copied_events(self, copied: CopiedRows, stored: DataFrame | None) -> DataFrame:
        """Write a copy as events."""
        return scd2.copied_events(copied, stored)

    def changed_events(self, touched: Touched, fold: Fold) -> DataFrame:
        """Give changes as events with their values."""
        return typed_events(touched.events, fold, touched.rows, touched.stored)

    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find the versions that begin, and those that end."""
        return build_versions(events, stored, fold, _tracked(self.work, fold.shape))

    def statement(self, fold: Fold, bounds: str | None) -> str:
        """Write the MERGE of an outcome."""
        tracked = _tracked(self.work, fold.shape)
        return scd2.merge_statement(self.work.path, fold, tracked, bounds)

    def truncating(self, truncate: Truncate) -> str:
        """Write the MERGE's clause that ends them."""
        return scd2.ending(truncate)


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
