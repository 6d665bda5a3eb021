"""What every kind of SCD table has: how a copy and changes are applied, and what was counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import watermark
from pgcdc_assets.merge.evolution import add_columns, retype_columns, set_properties
from pgcdc_assets.merge.preparation import TableWork
from pgcdc_assets.merge.shape import SCD1_COLUMNS, SystemColumns, TableShape, build_shape
from pgcdc_assets.merge.sources import version_of_copy
from pgcdc_assets.merge.tuning import SMALL_BYTES
from pgcdc_assets.merge.watermark import TargetState
from pgcdc_assets.merge.writing import overwrite
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.raw.zone import RawZone

# Their readers would see every row that is written again go and come.
_SEES_EVERY_ROW = ("delta.enableChangeDataFeed", "delta.enableRowTracking")


def rows_in(state: TargetState | None) -> int:
    """Give a table's count of rows."""
    return (state.row_count or 0) if state is not None else 0


def is_large(state: TargetState) -> bool:
    """Say whether a table is worth finding out which part of it a merge concerns."""
    return state.size_bytes > SMALL_BYTES


@dataclass(frozen=True)
class Counts:
    """What was written.

    Attributes:
        inserted: None where it follows from the table's own count of rows.
    """

    inserted: int | None = 0
    updated: int = 0
    deleted: int = 0
    may_be_rescued: bool = False

    def counted(self, before: TargetState | None, after: TargetState) -> Counts:
        """Fill in what was inserted between two states of the table."""
        if self.inserted is not None:
            return self
        return replace(self, inserted=rows_in(after) - rows_in(before) + self.deleted)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            (self.inserted or 0) + (other.inserted or 0),
            self.updated + other.updated,
            self.deleted + other.deleted,
            self.may_be_rescued or other.may_be_rescued,
        )


@dataclass(frozen=True)
class Kind(ABC):
    """Writes one SCD table; each method is at most one commit, which carries the watermark.

    Attributes:
        spark: a session that nobody else uses meanwhile.
    """

    system: ClassVar[SystemColumns] = SCD1_COLUMNS
    partitioned_by: ClassVar[tuple[str, ...]] = ()

    spark: SparkSession
    zone: RawZone
    work: TableWork

    @property
    def takes_copy_with_changes(self) -> bool:
        """Whether an empty copy needs no commit of its own."""
        return False

    @abstractmethod
    def apply_copy(self, state: TargetState | None, copy: Copy) -> Counts:
        """Make the table hold what a copy holds."""

    @abstractmethod
    def apply_changes(self, state: TargetState | None) -> Counts:
        """Fold the work's changes into the table.

        Args:
            state: None where the changes make the table.
        """

    def shape_of_copy(self, copy: Copy) -> TableShape:
        """Build the shape of a copy's tuples."""
        version = version_of_copy(self.work, copy)
        return build_shape([version], self.work.plan.target.key, system=self.system)

    def follow_relation(self, state: TargetState, shape: TableShape) -> None:
        """Have the table note the relation of a new copy, and take over its columns."""
        path = self.work.path
        add_columns(self.spark, path, state.columns, shape)
        retype_columns(self.spark, path, shape, self.partitioned_by)
        set_properties(self.spark, path, state.properties, shape)

    def empty(self, state: TargetState | None) -> Counts:
        """Take out all rows, where the changes are TRUNCATEs alone; the table keeps its shape."""
        plan = self.work.plan
        nothing = self.read_table().where("false")
        overwrite(nothing, self.work.path, self.zone.app_id(plan.epoch), plan.end)
        return Counts(deleted=rows_in(state))

    def may_write_anew(self, state: TargetState, shape: TableShape) -> bool:
        """Say whether rows that stay can be written again with those that change.

        Not where somebody added columns of their own, which only a MERGE leaves alone.
        """
        known = {field.name for field in shape.fields} | {name for name, _, _ in self.system}
        properties = state.properties
        sees = any(properties.get(name, "").lower() == "true" for name in _SEES_EVERY_ROW)
        return known.issuperset(state.columns) and not sees

    def check_unmoved(self, state: TargetState, epoch: int) -> None:
        """See that the table is what its new rows were found from.

        Right before the write: Delta sees to what happens from its start on.

        Raises:
            TransientError: another merge was faster.
        """
        found = state.watermark
        before: Lsn | None = found[1] if found is not None and found[0] == epoch else None
        watermark.check_unmoved(self.zone.lake, self.work.path, self.zone.app_id(epoch), before)

    def write_marked(self, state: TargetState, write: Callable[[str], None]) -> None:
        """Write new rows in one commit, and see that it is there.

        Args:
            state: what the rows were found from.
            write: is given the mark that its commit has to carry.

        Raises:
            TransientError: another merge was faster; Delta leaves out what was done already.
        """
        mark = f"pgcdc {uuid4()}"
        self.check_unmoved(state, self.work.plan.epoch)
        write(mark)
        watermark.check_committed(self.zone.lake, self.work.path, mark)

    def read_table(self) -> DataFrame:
        """Read the table as it is."""
        return self.spark.read.format("delta").load(self.work.path)
