"""The running copy of one table, which several connections share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.activity import Activity, activity
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.postgres.snapshots.age import SnapshotAge
from pgcdc_assets.protocol.utf8 import count_hex
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    import pyarrow as pa

    from pgcdc_assets.raw.ranges import LandedRange
    from pgcdc_assets.raw.snapshots import SnapshotLanding


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """The state of a large table's copy after one of its ranges.

    Attributes:
        ranges_done: complete ranges, those of earlier runs included.
        ranges: number of all ranges.
        row_count: rows that this run has read.
        byte_count: their size in memory.
        seconds: time since the first range of this run.
        seconds_left: estimate, by the ranges of this run.
        age: age of the server's snapshot.
    """

    name: TableName
    ranges_done: int
    ranges: int
    row_count: int
    byte_count: int
    seconds: float
    seconds_left: float
    age: SnapshotAge

    def __str__(self) -> str:
        return (
            f"Copied {self.ranges_done} of {self.ranges} ranges of {self.name}: "
            f"{self.row_count:,} rows and {self.byte_count / 1e6:,.0f} MB in {self.seconds:,.0f} "
            f"s, about {self.seconds_left:,.0f} s left. The snapshot is held for "
            f"{self.age.seconds:,.0f} s and is {self.age.transactions:,} transactions old"
        )


def ignore_progress(progress: SnapshotProgress) -> None:
    """Ignore the progress."""


@dataclass
class RowCounts:
    """The counts of rows that were read.

    Attributes:
        byte_count: size of the rows' texts in memory.
        rescued_count: number of values that are not UTF-8.
    """

    row_count: int = 0
    byte_count: int = 0
    rescued_count: int = 0

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> RowCounts:
        """Count the rows of a batch."""
        return cls(batch.num_rows, batch.nbytes, count_hex(batch.column("new")))

    def add(self, other: RowCounts) -> None:
        """Add the counts of further rows."""
        self.row_count += other.row_count
        self.byte_count += other.byte_count
        self.rescued_count += other.rescued_count


@dataclass(eq=False)
class TableCopy:
    """The running copy of one table. `lock` guards the attributes of several connections.

    Attributes:
        storage: digest for the ranges; None if ranges of this table cannot be continued.
        page_count: number of pages of the table.
        landed: ranges of earlier runs, which the copy brings to its snapshot.
        parts: number of ranges to read or to bring to the snapshot.
        open_parts: number of those that are not done.
        new_ranges: number of ranges that this copy has recorded.
        total: the counts of the rows that this copy has read.
        cut_by: the limit of the snapshot's age that was exceeded before the last range.
        conflict: the error of a standby that ended the snapshot.
        failure: the first error, after which the other ranges are skipped.
    """

    table: PublishedTable
    landing: SnapshotLanding
    stopping: threading.Event
    storage: str | None = None
    page_count: int = 0
    landed: tuple[LandedRange, ...] = ()
    parts: int = 0
    open_parts: int = 0
    new_ranges: int = 0
    began: float | None = None
    total: RowCounts = field(default_factory=RowCounts)
    cut_by: str | None = None
    conflict: PgcdcError | None = None
    failure: PgcdcError | None = None
    work: Activity | None = None
    shown: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> TableName:
        """The declared schema and table."""
        return self.table.declared_name

    def begin(self) -> None:
        """Start the clock with the first range."""
        with self.lock:
            if self.work is None:
                self.began = time.monotonic()
                name = f"snapshot of {self.table.relation.qualified_name}"
                self.work = self.shown.enter_context(activity(name, "rows"))

    def counted(
        self, batches: Iterable[pa.RecordBatch], counts: RowCounts
    ) -> Iterator[pa.RecordBatch]:
        """Yield batches, add them to the counts, and end if the copies are abandoned."""
        for batch in batches:
            self.check_running()
            read = RowCounts.of(batch)
            counts.add(read)
            with self.lock:
                self.total.add(read)
                if self.work is not None:
                    self.work.count = self.total.row_count
            yield batch
            failpoints.reach(failpoints.MID_COPY)

    def check_running(self) -> None:
        """Check that the copies were not abandoned.

        Raises:
            CopiesAbandoned: they were.
        """
        if self.stopping.is_set():
            raise CopiesAbandoned

    def progress(self, age: SnapshotAge) -> SnapshotProgress:
        """Describe the state of the copy, whose snapshot has this age."""
        with self.lock:
            done = self.parts - self.open_parts
            seconds = time.monotonic() - (self.began or time.monotonic())
            return SnapshotProgress(
                self.name,
                done,
                self.parts,
                self.total.row_count,
                self.total.byte_count,
                seconds,
                seconds / max(done, 1) * self.open_parts,
                age,
            )


class CopiesAbandoned(Exception):
    """The copies were abandoned."""
