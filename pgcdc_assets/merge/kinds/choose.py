"""Which kind a table is; and the current image, the plainest one."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.schema import SystemColumns, default_key, no_key
from pgcdc_assets.merge.kinds import current_image as scd1
from pgcdc_assets.merge.kinds.accumulating import History, SoftDeletes
from pgcdc_assets.merge.kinds.base import Counts, Kind, is_large, rows_in
from pgcdc_assets.merge.kinds.keyless import Bag, ChangeLog
from pgcdc_assets.merge.kinds.whole_table import WholeTable, read_files
from pgcdc_assets.merge.read import (
    is_made_by_its_changes,
    read_changes,
    relations_of,
    shape_of_changes,
    version_of_copy,
)
from pgcdc_assets.merge.task import TableWork
from pgcdc_assets.merge.write import KEY, replace_contents
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.tuning import is_tiny
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.state import TargetState, check_written, read_target

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

    def apply_copy(self, state: TargetState | None, copy: Copy, step: Step) -> Counts:
        """Replace the contents."""
        shape = self.shape_of_copy(copy)
        copied = self.read_copy(copy, shape)
        rows = scd1.copied_rows(copied, shape, copy.snapshot_lsn)
        self.replace_table(state, rows, shape, step)
        return Counts(copy.row_count, 0, rows_in(state), shape.may_rescue)

    def apply_changes(self, state: TargetState | None, step: Step) -> Counts:
        """Fold the changes to one row a key and merge them."""
        work, facts = self.work, self.work.facts
        assert facts is not None
        before = rows_in(state)
        if not work.version_order:
            return self.empty(state, step)
        makes_table = self.takes_copy_with_changes
        shape = shape_of_changes(work, None if makes_table else state, self.system)
        fold = Fold(shape, facts)
        changes = read_changes(self.spark, self.zone, work)
        if makes_table:
            rows = scd1.rows_alone(scd1.fold_changes(changes, fold, None), fold)
            self.replace_table(state, rows, shape, step)
            return Counts(None, 0, before, shape.may_rescue)
        assert state is not None
        step = self.follow_columns(state, shape, step)
        if state.is_empty or facts.truncates:
            rows = scd1.rows_alone(scd1.fold_changes(changes, fold, None), fold)
            replace_contents(work.path, rows, shape, step)
            return Counts(None, 0, before, shape.may_rescue)
        stored = self.read_table()
        rows = scd1.fold_changes(changes, fold, stored)
        if self._is_better_written_anew(state, fold):
            return Counts(*self._write_anew(rows, step, fold), shape.may_rescue)
        merged = scd1.merge_rows(self.spark, work.path, rows, fold, step, is_large=is_large(state))
        return Counts(*merged, shape.may_rescue)

    def _is_better_written_anew(self, state: TargetState, fold: Fold) -> bool:
        """Say whether one write of all rows is less than the jobs of a MERGE, and as good."""
        return (
            is_tiny(fold.facts.change_count, state.size_bytes, self.work.plan.change_bytes)
            and not fold.unknown
            # A MERGE matches no NULL. Columns of an identity that is an index have none; under FULL
            # the settings may name a key that has.
            and not (self.work.plan.target.key and fold.shape.relation.replica_identity == "f")
            and self.may_write_anew(state, fold.shape)
        )

    def _write_anew(self, rows: DataFrame, step: Step, fold: Fold) -> tuple[int, int, int]:
        path = self.work.path
        # The state may be from before the tables that were merged first.
        newest = read_target(self.zone.lake, self.zone.name, path)
        assert newest is not None
        whole = WholeTable.of(rows, read_files(self.spark, newest), fold)
        whole.write(path, step)
        check_written(self.zone, path, step)
        return whole.counts()
