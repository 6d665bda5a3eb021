"""`raw/ranges`: the ranges of large tables that were read for snapshots which are not complete.

The rows of a range are in data files in the folder of `raw/snapshots` that no log entry of
`raw/snapshots` names yet. A table has few files here, of which a new range replaces the small ones.
The commit that completes the table's snapshot names the data files, and then the table's files here
are removed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from deltalake import DeltaTable

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta.compaction import removals
from pgcdc_assets.raw.delta.files import WrittenFile
from pgcdc_assets.raw.delta.scan import DataFile, data_files, scan
from pgcdc_assets.raw.delta.table import CommitRefused, RawTable
from pgcdc_assets.table_name import TableName

PARTITION_BY = ("epoch", "schema", "table")

ABANDONED_DAYS = 30

_ATTEMPTS = 5


@dataclass(frozen=True)
class LandedRange:
    """A range of pages of a table, with the rows as of one snapshot.

    Attributes:
        snapshot_lsn: LSN of the snapshot in which the range was read.
        relation_version: version of the table's columns in `raw/relations`.
        start_page: the first page.
        end_page: the page after the last page; None: no end.
        page_count: number of pages of the table at that time.
        xmin: all transactions below this 64-bit id had ended at the snapshot.
        storage: digest of what determines the places and texts of unchanged rows.
        row_count: number of rows.
        byte_count: size of the rows' texts in memory.
        rescued_count: number of values that are not UTF-8.
        began_at: time at which the reading of the range began.
        read_at: time at which the range was complete.
        files: the data files with the rows.
    """

    epoch: int
    schema: str
    table: str
    snapshot_lsn: Lsn
    relation_id: int
    relation_version: int
    start_page: int
    end_page: int | None
    page_count: int
    xmin: int
    storage: str
    row_count: int
    byte_count: int
    rescued_count: int
    began_at: dt.datetime
    read_at: dt.datetime
    files: tuple[WrittenFile, ...]

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    @property
    def pages_read(self) -> int:
        """The number of pages, without the pages that the table did not have."""
        end = self.page_count if self.end_page is None else self.end_page
        return max(0, min(end, self.page_count) - self.start_page)


@dataclass(frozen=True)
class UnfinishedCopy:
    """What is copied of a table whose snapshot is not complete, by its ranges.

    Attributes:
        range_count: number of ranges that were read.
        pages_read: number of their pages.
        page_count: number of pages of the table.
        row_count: number of rows that were read.
        byte_count: their size in memory.
        read_at: time of the last range.
        seconds_left: for the other pages, as fast as in the newest snapshot of the server.
    """

    name: TableName
    range_count: int
    pages_read: int
    page_count: int
    row_count: int
    byte_count: int
    read_at: dt.datetime
    seconds_left: float

    @classmethod
    def of(cls, ranges: Sequence[LandedRange]) -> UnfinishedCopy:
        """Sum up the ranges of one table."""
        newest = max(ranges, key=lambda landed: landed.read_at)
        current = [each for each in ranges if each.snapshot_lsn == newest.snapshot_lsn]
        seconds = (newest.read_at - min(each.began_at for each in current)).total_seconds()
        pages_read = sum(landed.pages_read for landed in ranges)
        current_pages = max(1, sum(landed.pages_read for landed in current))
        left = max(0, newest.page_count - pages_read)
        return cls(
            newest.name,
            len(ranges),
            pages_read,
            newest.page_count,
            sum(landed.row_count for landed in ranges),
            sum(landed.byte_count for landed in ranges),
            newest.read_at,
            seconds / current_pages * left,
        )


@dataclass(frozen=True)
class RangeStore:
    """The ranges of one capture's incomplete snapshots.

    Attributes:
        table: the Delta table.
        capture: the capture's name.
    """

    table: RawTable
    capture: str

    def all(self) -> list[LandedRange]:
        """Return all ranges, by table and page."""
        loaded = self.table.load()
        return [] if loaded is None else self._read(data_files(loaded))

    def unfinished_copies(self, epoch: int) -> list[UnfinishedCopy]:
        """Sum up the ranges of each table in an epoch."""
        own = [landed for landed in self.all() if landed.epoch == epoch]
        return [
            UnfinishedCopy.of(list(ranges))
            for _, ranges in itertools.groupby(own, key=lambda landed: landed.name)
        ]

    def append(self, landed: LandedRange) -> None:
        """Record a range. Its data files are written.

        Raises:
            TransientError: the lake cannot be written.
        """
        for _ in range(_ATTEMPTS):
            loaded = self.table.load_or_create()
            joined = _files_to_join(_files_of(loaded, landed.epoch, landed.name))
            partition = {
                "epoch": str(landed.epoch),
                "schema": landed.schema,
                "table": landed.table,
            }
            if self.table.commit_rows(
                loaded,
                [_row(each) for each in [*self._read(joined), landed]],
                partition_values=partition,
                removed=removals(joined),
                app_id=self._app_id(landed.epoch, landed.name),
                app_version=loaded.version() + 1,
            ):
                return
        raise TransientError(
            reason=f"Other processes write to {self.table.uri} at the same time. A range of "
            f"{landed.name} was not recorded; run it again."
        )

    def remove(self, epoch: int, name: TableName) -> None:
        """Remove the ranges of a table, whose snapshot is complete or cannot be continued."""
        for _ in range(_ATTEMPTS):
            loaded = self.table.load()
            old = [] if loaded is None else _files_of(loaded, epoch, name)
            if loaded is None or not old:
                return
            app_id, app_version = self._app_id(epoch, name), loaded.version() + 1
            with contextlib.suppress(CommitRefused):
                self.table.commit(
                    loaded, [], removed=removals(old), app_id=app_id, app_version=app_version
                )
                return

    def remove_abandoned(self) -> bool:
        """Remove the ranges of tables of which none was read within `ABANDONED_DAYS`.

        Returns:
            Whether there were such ranges.
        """
        oldest = dt.datetime.now(dt.UTC) - dt.timedelta(days=ABANDONED_DAYS)
        newest: dict[tuple[int, TableName], dt.datetime] = {}
        for landed in self.all():
            key = landed.epoch, landed.name
            newest[key] = max(landed.read_at, newest.get(key, landed.read_at))
        abandoned = [key for key, read_at in newest.items() if read_at < oldest]
        for epoch, name in abandoned:
            self.remove(epoch, name)
        return bool(abandoned)

    def _app_id(self, epoch: int, name: TableName) -> str:
        return f"pgcdc:{self.capture}:{epoch}:ranges:{name.record_name}"

    def _read(self, files: Iterable[DataFile]) -> list[LandedRange]:
        names = [f.name for f in fields(LandedRange) if f.name not in PARTITION_BY]
        found = [
            _range(row | {key: file.partition[key] for key in PARTITION_BY})
            for file in files
            for batch in scan(self.table, [file], names)
            for row in batch.to_pylist()
        ]
        return sorted(found, key=lambda r: (r.epoch, r.name, r.start_page))


def _files_of(loaded: DeltaTable, epoch: int, name: TableName) -> list[DataFile]:
    def is_own(file: DataFile) -> bool:
        part = file.partition
        return (int(part["epoch"]), part["schema"], part["table"]) == (epoch, *name)

    return [file for file in data_files(loaded) if is_own(file)]


def _files_to_join(files: Iterable[DataFile]) -> list[DataFile]:
    """Return the files of a table that a new range replaces, because it joins their ranges.

    A file is joined if it has no more ranges than the new file would have without it. A table of n
    ranges therefore has log2(n) files at most, and a range is written as many times. In a single
    file, each of n ranges would be written up to n times.
    """
    joined: list[DataFile] = []
    count = 1
    for file in sorted(files, key=lambda file: file.row_count or 0):
        row_count = file.row_count or 0
        if row_count > count:
            break
        joined.append(file)
        count += row_count
    return joined


def _row(landed: LandedRange) -> dict[str, object]:
    row = {name: value for name, value in asdict(landed).items() if name not in PARTITION_BY}
    return row | {
        "snapshot_lsn": int(landed.snapshot_lsn),
        "files": json.dumps([asdict(file) for file in landed.files]),
    }


def _range(row: dict[str, object]) -> LandedRange:
    files = json.loads(str(row["files"]))
    values = row | {
        "epoch": int(str(row["epoch"])),
        "snapshot_lsn": Lsn(int(str(row["snapshot_lsn"]))),
        "files": tuple(WrittenFile(**file) for file in files),
    }
    return LandedRange(**values)  # type: ignore[arg-type]
