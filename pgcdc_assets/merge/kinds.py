"""The kinds of SCD table that have a key, and which kind a table is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import scd1, scd2, soft_deletes
from pgcdc_assets.merge.events import Fold
from pgcdc_assets.merge.evolution import add_columns, set_properties
from pgcdc_assets.merge.facts import ChangeFacts
from pgcdc_assets.merge.keyless import Bag, ChangeLog
from pgcdc_assets.merge.kind import Counts, Kind, is_large, rows_in
from pgcdc_assets.merge.preparation import TableWork
from pgcdc_assets.merge.shape import (
    SCD2_COLUMNS,
    SOFT_DELETE_COLUMNS,
    SystemColumns,
    TableShape,
    default_key,
    no_key,
)
from pgcdc_assets.merge.sources import (
    is_made_by_its_changes,
    read_changes,
    read_copy,
    relations_of,
    shape_of_changes,
    version_of_copy,
)
from pgcdc_assets.merge.versions import find_touched, typed_events
from pgcdc_assets.merge.watermark import TargetState
from pgcdc_assets.merge.writing import (
    KEY,
    append,
    create_or_replace,
    overwrite,
    replace_contents,
    run_merge,
)
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.raw.zone import RawZone

# Columns that some kinds of SCD1 have and others do not.
_MARKS = {"_deleted": "soft deletes", "_op": "a log of changes"}


def choose_kind(spark: SparkSession, zone: RawZone, work: TableWork) -> Kind:
    """Say how a table is written.

    Args:
        spark: a session that nobody else uses meanwhile.

    Raises:
        ReplicaIdentityError: what is asked for needs a key, and the table has none.
        ConfigurationError: the existing table was made as another kind.
    """
    target = work.plan.target
    kind: type[Kind]
    if not _has_key(work):
        relation = relations_of(work)[-1].relation
        if work.scd == 2:
            raise no_key(relation, "so its versions cannot be told apart: it can have scd: [1]")
        if target.soft_deletes:
            raise no_key(relation, "so a deleted row cannot be told from those equal to it")
        kind = ChangeLog if target.without_key == "log" else Bag
    elif work.scd == 2:
        kind = History
    else:
        kind = SoftDeletes if target.soft_deletes else CurrentImage
    if work.scd == 1 and work.state is not None:
        _check_made_alike(work, work.state, kind.system)
    return kind(spark, zone, work)


def _has_key(work: TableWork) -> bool:
    """Say whether something tells the rows apart that are to be folded."""
    if work.plan.target.key:
        return True
    if work.plan.copy is not None:
        return bool(default_key(version_of_copy(work, work.plan.copy).relation))
    return work.state is None or work.state.properties.get(KEY) != ""


def _check_made_alike(work: TableWork, state: TargetState, system: SystemColumns) -> None:
    sent = {c.name for version in relations_of(work) for c in version.relation.columns}
    wanted = {name for name, _, _ in system}
    for column, meaning in _MARKS.items():
        if column in sent or (column in wanted) == (column in state.columns):
            continue
        made = "with" if column in state.columns else "without"
        raise ConfigurationError(
            reason=f"Table {work.plan.target.qualified_name}: its SCD1 table was made {made} "
            f"{meaning}, and its settings say otherwise now. Make it anew: `pgcdc rebuild`."
        )


@dataclass(frozen=True)
class CurrentImage(Kind):
    """Writes the current image."""

    @property
    def takes_copy_with_changes(self) -> bool:
        """Whether an empty copy needs no commit of its own."""
        return is_made_by_its_changes(self.work)

    def apply_copy(self, state: TargetState | None, copy: Copy) -> Counts:
        """Replace the contents."""
        shape = self.shape_of_copy(copy)
        copied = read_copy(self.spark, self.zone, copy)
        scd1.write_copy(
            self.work.path, copied, shape, self.zone.app_id(copy.epoch), copy.snapshot_lsn
        )
        return Counts(copy.row_count, 0, rows_in(state), shape.may_rescue)

    def apply_changes(self, state: TargetState | None) -> Counts:
        """Fold the changes to one row a key and merge them."""
        work, facts = self.work, self.work.facts
        assert facts is not None
        end, app_id = work.plan.end, self.zone.app_id(work.plan.epoch)
        before = rows_in(state)
        if not work.version_order:
            # Nothing but TRUNCATE: the table keeps its shape and loses its rows.
            overwrite(self.read_table().where("false"), work.path, app_id, end)
            return Counts(deleted=before)
        makes_table = self.takes_copy_with_changes
        shape = shape_of_changes(work, None if makes_table else state, self.system)
        fold = Fold(shape, facts)
        changes = read_changes(self.spark, self.zone, work)
        if makes_table:
            rows = scd1.rows_alone(scd1.fold_changes(changes, fold, None), fold)
            create_or_replace(work.path, rows, shape, app_id, end)
            return Counts(None, 0, before, shape.may_rescue)
        assert state is not None
        add_columns(self.spark, work.path, state.columns, shape)
        if state.is_empty or facts.truncates:
            rows = scd1.rows_alone(scd1.fold_changes(changes, fold, None), fold)
            replace_contents(work.path, rows, shape, app_id, end)
            return Counts(None, 0, before, shape.may_rescue)
        stored = self.read_table()
        rows = scd1.fold_changes(changes, fold, stored)
        merged = scd1.merge_rows(
            self.spark, work.path, rows, fold, app_id, end, is_large=is_large(state)
        )
        return Counts(*merged, shape.may_rescue)


@dataclass(frozen=True)
class SoftDeletes(Kind):
    """Writes the current image and keeps deleted rows in it."""

    system: ClassVar[SystemColumns] = SOFT_DELETE_COLUMNS

    def apply_copy(self, state: TargetState | None, copy: Copy) -> Counts:
        """Begin with the copy; later, what a copy does not hold any more is deleted."""
        work = self.work
        shape = self.shape_of_copy(copy)
        copied = read_copy(self.spark, self.zone, copy)
        app_id, lsn = self.zone.app_id(copy.epoch), copy.snapshot_lsn
        if state is None:
            scd1.write_copy(work.path, copied, shape, app_id, lsn)
            return Counts(copy.row_count, may_be_rescued=shape.may_rescue)
        assert work.copied_at is not None
        add_columns(self.spark, work.path, state.columns, shape)
        set_properties(self.spark, work.path, state.properties, shape)
        stored = None if state.is_empty else self.read_table()
        there = None if stored is None else soft_deletes.in_place(stored)
        events = scd2.copied_events(copied, there, shape, lsn, work.copied_at)
        # A copied row has no commit time in SCD1.
        events = events.selectExpr(
            *(name for name in events.columns if name != "commit_ts"),
            "CAST(NULL AS TIMESTAMP) AS commit_ts",
        )
        return self._write(events, stored, Fold(shape, ChangeFacts()), copy.epoch, lsn)

    def apply_changes(self, state: TargetState | None) -> Counts:
        """Find what each key last held, and merge that."""
        work, facts = self.work, self.work.facts
        assert facts is not None and state is not None
        epoch, end = work.plan.epoch, work.plan.end
        if not work.version_order:
            deleted = soft_deletes.delete_all(
                self.spark, work.path, facts.truncates[0], self.zone.app_id(epoch), end
            )
            return Counts(updated=deleted)
        shape = shape_of_changes(work, state, self.system)
        add_columns(self.spark, work.path, state.columns, shape)
        fold = Fold(shape, facts)
        changes = read_changes(self.spark, self.zone, work, keeps_truncated=True)
        rows = None if state.is_empty else self.read_table()
        touched = find_touched(changes, rows, fold, is_large=is_large(state))
        events, stored = soft_deletes.changed_events(touched, fold)
        return self._write(events, stored, fold, epoch, end, touched.bounds)

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
        rows = soft_deletes.last_contents(events, stored, fold)
        if stored is None:
            append(path, rows, fold.shape, app_id, watermark)
            return Counts(None, may_be_rescued=fold.shape.may_rescue)
        statement = soft_deletes.merge_statement(path, fold, bounds)
        inserted, updated, _ = run_merge(self.spark, rows, statement, app_id, watermark)
        return Counts(inserted, updated, may_be_rescued=fold.shape.may_rescue)


@dataclass(frozen=True)
class History(Kind):
    """Writes the history."""

    system: ClassVar[SystemColumns] = SCD2_COLUMNS

    def apply_copy(self, state: TargetState | None, copy: Copy) -> Counts:
        """Begin with the copy, or add what it says differently as versions."""
        work, at = self.work, self.work.copied_at
        assert at is not None
        shape = self.shape_of_copy(copy)
        copied = read_copy(self.spark, self.zone, copy)
        app_id, lsn = self.zone.app_id(copy.epoch), copy.snapshot_lsn
        if state is None:
            scd2.write_first_copy(work.path, copied, shape, app_id, lsn, at)
            return Counts(copy.row_count, may_be_rescued=shape.may_rescue)
        add_columns(self.spark, work.path, state.columns, shape)
        set_properties(self.spark, work.path, state.properties, shape)
        current = None if state.is_empty else scd2.current_rows(self.spark, work.path)
        events = scd2.copied_events(copied, current, shape, lsn, at)
        return self._write(events, current, Fold(shape, ChangeFacts()), copy.epoch, lsn)

    def apply_changes(self, state: TargetState | None) -> Counts:
        """Find the versions that the changes make and end, and merge them."""
        work, facts = self.work, self.work.facts
        assert facts is not None and state is not None
        epoch, end = work.plan.epoch, work.plan.end
        if not work.version_order:
            ended = scd2.end_all(
                self.spark, work.path, facts.truncates[0], self.zone.app_id(epoch), end
            )
            return Counts(updated=ended)
        shape = shape_of_changes(work, state, self.system)
        add_columns(self.spark, work.path, state.columns, shape)
        fold = Fold(shape, facts)
        changes = read_changes(self.spark, self.zone, work, keeps_truncated=True)
        current = None if state.is_empty else scd2.current_rows(self.spark, work.path)
        touched = find_touched(changes, current, fold, is_large=is_large(state))
        events = typed_events(touched.events, fold, touched.rows, touched.stored)
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
        tracked = _tracked(self.work, fold.shape)
        inserted, updated = scd2.write_versions(
            self.spark, path, events, stored, fold, tracked, app_id, watermark, bounds
        )
        return Counts(inserted, updated, may_be_rescued=fold.shape.may_rescue)


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
