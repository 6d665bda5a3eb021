"""The merge of one SCD table, from its copy or its watermark on."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import scd1, scd2
from pgcdc_assets.merge.events import Fold
from pgcdc_assets.merge.evolution import add_columns, set_properties
from pgcdc_assets.merge.facts import ChangeFacts
from pgcdc_assets.merge.preparation import TableWork
from pgcdc_assets.merge.report import MergeReport
from pgcdc_assets.merge.shape import SCD1_COLUMNS, SCD2_COLUMNS, TableShape, build_shape
from pgcdc_assets.merge.sources import (
    is_made_by_its_changes,
    read_changes,
    read_copy,
    shape_of_changes,
    version_of_copy,
)
from pgcdc_assets.merge.sql import delta_table
from pgcdc_assets.merge.tuning import tune
from pgcdc_assets.merge.watermark import TargetState, advance_watermark, read_target
from pgcdc_assets.merge.writing import create_or_replace, overwrite, replace_contents
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.raw.zone import RawZone

# How far the recorded watermark of a table without changes may fall behind: its next merge looks
# through the records of that many windows.
IDLE_WINDOWS = 10

_POSITION = {1: "_lsn", 2: "_valid_from_lsn"}


def pass_by(zone: RawZone, work: TableWork) -> MergeReport:
    """Report a table without changes; its watermark is recorded only now and then."""
    plan = work.plan
    if plan.end > plan.start and (plan.recorded_changes or len(plan.windows) >= IDLE_WINDOWS):
        advance_watermark(zone.lake, work.path, zone.app_id(plan.epoch), plan.start, plan.end)
    return MergeReport(
        *work.name,
        work.scd,
        work.path,
        watermark_before=work.watermark_before,
        watermark_after=plan.end,
        windows_folded=len(plan.windows),
        row_count=work.state.row_count if work.state is not None else None,
        seconds=time.monotonic() - work.started,
    )


def merge_table(spark: SparkSession, zone: RawZone, work: TableWork) -> MergeReport:
    """Apply the copy, if one is due, and then the changes; at most one commit each.

    Args:
        spark: a session that nobody else uses meanwhile.

    Raises:
        DefiniteError: what the raw zone holds cannot be folded into this table.
        TransientError: another merge of the table was faster.
    """
    started = time.monotonic()
    plan, state = work.plan, work.state
    counts = _Counts()
    tune(spark, _rows_to_handle(work), state.size_bytes if state is not None else 0)
    kind: _Scd1 | _Scd2 = (_Scd1 if work.scd == 1 else _Scd2)(spark, zone, work)
    if plan.copy is not None and not kind.takes_copy_with_changes:
        written = kind.apply_copy(state, plan.copy)
        before, state = state, _state(zone, work, plan.copy.snapshot_lsn)
        counts += written.counted(before, state)
    if work.facts is not None:
        written = kind.apply_changes(state)
        before, state = state, _state(zone, work, plan.end)
        counts += written.counted(before, state)
    elif plan.end > plan.start:
        advance_watermark(zone.lake, work.path, zone.app_id(plan.epoch), plan.start, plan.end)
    assert state is not None
    return MergeReport(
        *work.name,
        work.scd,
        work.path,
        watermark_before=work.watermark_before,
        watermark_after=plan.end,
        windows_folded=len(plan.windows),
        changes_read=work.facts.change_count if work.facts is not None else 0,
        rows_inserted=counts.inserted or 0,
        rows_updated=counts.updated,
        rows_deleted=counts.deleted,
        rows_rescued=_count_rescued(spark, work, state) if counts.may_be_rescued else 0,
        snapshot_lsn=plan.copy.snapshot_lsn if plan.copy is not None else None,
        row_count=state.row_count,
        seconds=time.monotonic() - started,
    )


def _rows_to_handle(work: TableWork) -> int:
    copied = work.plan.copy.row_count if work.plan.copy is not None else 0
    return copied + (work.facts.change_count if work.facts is not None else 0)


@dataclass(frozen=True)
class _Counts:
    """What was written.

    Attributes:
        inserted: None where it follows from the table's own count of rows.
    """

    inserted: int | None = 0
    updated: int = 0
    deleted: int = 0
    may_be_rescued: bool = False

    def counted(self, before: TargetState | None, after: TargetState) -> _Counts:
        """Fill in what was inserted between two states of the table."""
        if self.inserted is not None:
            return self
        return replace(self, inserted=_rows_in(after) - _rows_in(before) + self.deleted)

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(
            (self.inserted or 0) + (other.inserted or 0),
            self.updated + other.updated,
            self.deleted + other.deleted,
            self.may_be_rescued or other.may_be_rescued,
        )


@dataclass(frozen=True)
class _Scd1:
    """Writes the current image."""

    spark: SparkSession
    zone: RawZone
    work: TableWork

    @property
    def takes_copy_with_changes(self) -> bool:
        """Whether an empty copy needs no commit of its own."""
        return is_made_by_its_changes(self.work)

    def apply_copy(self, state: TargetState | None, copy: Copy) -> _Counts:
        """Replace the contents."""
        shape = build_shape([version_of_copy(self.work, copy)], self.work.plan.target.key)
        copied = read_copy(self.spark, self.zone, copy)
        scd1.write_copy(
            self.work.path, copied, shape, self.zone.app_id(copy.epoch), copy.snapshot_lsn
        )
        return _Counts(copy.row_count, 0, _rows_in(state), shape.may_rescue)

    def apply_changes(self, state: TargetState | None) -> _Counts:
        """Fold the changes to one row a key and merge them."""
        work, facts = self.work, self.work.facts
        assert facts is not None
        end, app_id = work.plan.end, self.zone.app_id(work.plan.epoch)
        before = _rows_in(state)
        if not work.version_order:
            # Nothing but TRUNCATE: the table keeps its shape and loses its rows.
            nothing = self.spark.read.format("delta").load(work.path).where("false")
            overwrite(nothing, work.path, app_id, end)
            return _Counts(deleted=before)
        makes_table = self.takes_copy_with_changes
        shape = shape_of_changes(work, None if makes_table else state, SCD1_COLUMNS)
        fold = Fold(shape, facts)
        changes = read_changes(self.spark, self.zone, work)
        if makes_table:
            rows = scd1.rows_alone(scd1.fold_changes(changes, fold, None), fold)
            create_or_replace(work.path, rows, shape, app_id, end)
            return _Counts(None, 0, before, shape.may_rescue)
        assert state is not None
        add_columns(self.spark, work.path, state.columns, shape)
        if state.is_empty or facts.truncates:
            rows = scd1.rows_alone(scd1.fold_changes(changes, fold, None), fold)
            replace_contents(work.path, rows, shape, app_id, end)
            return _Counts(None, 0, before, shape.may_rescue)
        stored = self.spark.read.format("delta").load(work.path)
        rows = scd1.fold_changes(changes, fold, stored)
        merged = scd1.merge_rows(self.spark, work.path, rows, fold, app_id, end)
        return _Counts(*merged, shape.may_rescue)


@dataclass(frozen=True)
class _Scd2:
    """Writes the history."""

    spark: SparkSession
    zone: RawZone
    work: TableWork

    takes_copy_with_changes = False

    def apply_copy(self, state: TargetState | None, copy: Copy) -> _Counts:
        """Begin with the copy, or add what it says differently as versions."""
        work, at = self.work, self.work.copied_at
        assert at is not None
        version = version_of_copy(work, copy)
        shape = build_shape([version], work.plan.target.key, system=SCD2_COLUMNS)
        copied = read_copy(self.spark, self.zone, copy)
        app_id, lsn = self.zone.app_id(copy.epoch), copy.snapshot_lsn
        if state is None:
            scd2.write_first_copy(work.path, copied, shape, app_id, lsn, at)
            return _Counts(copy.row_count, may_be_rescued=shape.may_rescue)
        add_columns(self.spark, work.path, state.columns, shape)
        set_properties(self.spark, work.path, state.properties, shape)
        current = None if state.is_empty else scd2.current_rows(self.spark, work.path)
        events = scd2.copied_events(copied, current, shape, lsn, at)
        return self._write(events, current, Fold(shape, ChangeFacts()), state, copy.epoch, lsn)

    def apply_changes(self, state: TargetState | None) -> _Counts:
        """Find the versions that the changes make and end, and merge them."""
        work, facts = self.work, self.work.facts
        assert facts is not None and state is not None
        epoch, end = work.plan.epoch, work.plan.end
        if not work.version_order:
            ended = scd2.end_all(
                self.spark, work.path, facts.truncates[0], self.zone.app_id(epoch), end
            )
            return _Counts(updated=ended)
        shape = shape_of_changes(work, state, SCD2_COLUMNS)
        add_columns(self.spark, work.path, state.columns, shape)
        fold = Fold(shape, facts)
        changes = read_changes(self.spark, self.zone, work, keeps_truncated=True)
        current = None if state.is_empty else scd2.current_rows(self.spark, work.path)
        events, stored = scd2.changed_events(changes, current, fold)
        return self._write(events, stored, fold, state, epoch, end)

    def _write(
        self,
        events: DataFrame,
        stored: DataFrame | None,
        fold: Fold,
        state: TargetState,
        epoch: int,
        watermark: Lsn,
    ) -> _Counts:
        path, app_id = self.work.path, self.zone.app_id(epoch)
        tracked = _tracked(self.work, fold.shape)
        inserted, updated = scd2.write_versions(
            self.spark, path, events, stored, fold, tracked, app_id, watermark
        )
        return _Counts(inserted, updated, may_be_rescued=fold.shape.may_rescue)


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


def _rows_in(state: TargetState | None) -> int:
    return (state.row_count or 0) if state is not None else 0


def _state(zone: RawZone, work: TableWork, watermark: Lsn) -> TargetState:
    """Read the table anew; its log must carry the watermark that was just written."""
    state = read_target(zone.lake, zone.name, work.path)
    if state is None or state.watermark is None or state.watermark < (work.plan.epoch, watermark):
        raise TransientError(
            reason=f"Table {work.plan.target.qualified_name} was not merged through {watermark}: "
            "its log does not carry that watermark. Run it again."
        )
    return state


def _count_rescued(spark: SparkSession, work: TableWork, state: TargetState) -> int:
    """Count the rows written by this merge that have a rescued value.

    Where the new files' statistics say that there is none, which is the rule, nothing is read.
    """
    known = work.state.rescued if work.state is not None else {}
    if not any(count != 0 for path, count in state.rescued.items() if path not in known):
        return 0
    row = spark.sql(
        f"SELECT count(*) AS n FROM {delta_table(work.path)} "
        f"WHERE _rescued IS NOT NULL AND {_POSITION[work.scd]} >= {int(work.plan.start)}"
    ).collect()[0]
    return int(row["n"])
