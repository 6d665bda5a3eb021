"""The ranges of a large table's copy, and how a later snapshot continues with earlier ranges.

A range that is complete is recorded in `raw/ranges`. After an interruption, the next run takes a
new snapshot. Each earlier range is brought to that snapshot: rows that were deleted or moved since
are taken out of the range's files, and rows that are newer are read. A snapshot of a table is
therefore exact at one LSN, however many runs have read the table. Proof: decision 33.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets import failpoints
from pgcdc_assets.capture.snapshots.table_copy import RowCounts, TableCopy
from pgcdc_assets.errors import TransientError
from pgcdc_assets.postgres.copy.reader import Pages, SnapshotReader
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.scan import DataFile, UnreadableFile, data_files, scan
from pgcdc_assets.raw.ranges import LandedRange

if TYPE_CHECKING:
    from pgcdc_assets.postgres.catalog.relations import PublishedTable
    from pgcdc_assets.postgres.copy.ranges import RangeSource
    from pgcdc_assets.raw.delta.table import RawTable
    from pgcdc_assets.raw.ranges import RangeStore
    from pgcdc_assets.raw.zone import RawZone

# No text of Postgres contains this character.
_SEPARATOR = "\0"
_NULL = "\0\0"


def find_usable_ranges(
    zone: RawZone,
    epoch: int,
    table: PublishedTable,
    version: int,
    source: RangeSource,
    ranges: Iterable[LandedRange],
) -> list[LandedRange]:
    """Return the ranges that a snapshot may continue, in page order and without an overlap.

    Args:
        version: the relation version of the table's columns.
        source: the state of the new snapshot.
        ranges: all recorded ranges.
    """
    relation = table.relation
    storage = source.storage.get(relation.relation_id)
    found = [
        landed
        for landed in ranges
        if landed.name == table.declared_name
        and landed.epoch == epoch
        and landed.relation_id == relation.relation_id
        and landed.relation_version == version
        and landed.storage == storage
        and source.can_compare(landed.xmin)
    ]
    there = _present_files(zone.snapshots.table, found)
    usable: list[LandedRange] = []
    for landed in sorted(found, key=lambda each: each.start_page):
        end = usable[-1].end_page if usable else 0
        # Two processes may have read the same table.
        is_free = end is not None and landed.start_page >= end
        if is_free and all(there.get(file.path) == file.size_bytes for file in landed.files):
            usable.append(landed)
    return usable


def _present_files(table: RawTable, ranges: Sequence[LandedRange]) -> dict[str, int]:
    """Return the sizes of the ranges' files that exist and belong to no complete snapshot."""
    loaded = table.load()
    paths = {file.path for landed in ranges for file in landed.files}
    if loaded is None or not paths:
        return {}
    paths -= {file.path for file in data_files(loaded)}
    found = filesystem(table.lake, table.uri).get_file_info(sorted(paths))
    return {info.path: info.size for info in found if info.is_file}


def cut_unread_pages(landed: Sequence[LandedRange], page_count: int, step: int) -> Iterator[Pages]:
    """Yield the ranges that are left to read.

    Args:
        landed: the ranges that were read, in page order.
        page_count: number of pages of the table. Later pages have no row of the snapshot.
        step: number of pages of a range.
    """
    position: int | None = 0
    for each in landed:
        assert position is not None
        starts = range(position, each.start_page, step)
        yield from (Pages(start, min(start + step, each.start_page)) for start in starts)
        position = each.end_page
    if position is not None:
        starts = range(position, max(page_count, position + 1), step)
        # The last range has no end.
        yield from (Pages(s, None if s == starts[-1] else s + step) for s in starts)


def read_range(
    reader: SnapshotReader,
    copy: TableCopy,
    pages: Pages,
    source: RangeSource,
    ranges: RangeStore,
) -> None:
    """Read a range, and record the range if a later run could continue the copy.

    Raises:
        PgcdcError: the table cannot be read, or the lake cannot be written.
    """
    began_at = dt.datetime.now(dt.UTC)
    counts = RowCounts()
    # An error of the lake holds the frames that refer to the iterator: close it here.
    with contextlib.closing(reader.read(copy.table, pages)) as batches:
        files = copy.landing.write(copy.counted(batches, counts))
    if copy.storage is None or copy.parts == 1:
        return
    failpoints.reach(failpoints.BEFORE_RANGE_COMMIT)
    landed = LandedRange(
        epoch=copy.landing.snapshot.epoch,
        schema=copy.name.schema,
        table=copy.name.table,
        snapshot_lsn=copy.landing.snapshot.snapshot_lsn,
        relation_id=copy.table.relation.relation_id,
        relation_version=copy.landing.snapshot.relation_version,
        start_page=pages.start,
        end_page=pages.end,
        page_count=copy.page_count,
        xmin=source.xmin,
        storage=copy.storage,
        row_count=sum(file.row_count for file in files),
        byte_count=counts.byte_count,
        rescued_count=counts.rescued_count,
        began_at=began_at,
        read_at=dt.datetime.now(dt.UTC),
        files=tuple(files),
    )
    with copy.lock:
        ranges.append(landed)
        copy.landing.keep(files)
        copy.new_ranges += 1
    failpoints.reach(failpoints.AFTER_RANGE_COMMIT)


def refresh_range(reader: SnapshotReader, copy: TableCopy, landed: LandedRange) -> None:
    """Bring a range of an earlier snapshot to the snapshot of the reader.

    Raises:
        PgcdcError: the table cannot be read, or the lake cannot be written.
    """
    table, pages = copy.table, Pages(landed.start_page, landed.end_page)
    if reader.count_older(table, pages, landed.xmin) == landed.row_count:
        copy.landing.add(landed.files)
    else:
        with contextlib.closing(reader.read_older_keys(table, pages, landed.xmin)) as batches:
            keys = [_key_texts(rows.column("new"), range(_width(rows))) for rows in batches]
        alive = pa.concat_arrays(keys) if keys else pa.array([], pa.large_string())
        copy.landing.write(_rows_of_keys(copy, landed, alive))
    with contextlib.closing(reader.read_newer(table, pages, landed.xmin)) as batches:
        copy.landing.write(copy.counted(batches, RowCounts()))
    failpoints.reach(failpoints.AFTER_RANGE_REFRESH)


def _rows_of_keys(
    copy: TableCopy, landed: LandedRange, alive: pa.Array
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range's files whose keys are among the given keys."""
    relation = copy.table.relation
    names = [column.name for column in relation.columns]
    places = [names.index(name) for name in relation.row_key]
    table = copy.landing.store.table
    files = [DataFile(f.path, f.size_bytes, f.row_count, {}, {}, {}) for f in landed.files]
    try:
        for rows in scan(table, files, ["new"]):
            copy.check_running()
            is_alive = pc.is_in(_key_texts(rows.column("new"), places), value_set=alive)
            yield rows.filter(is_alive)
    except UnreadableFile as error:
        raise TransientError(
            reason=f"A file of a range of {relation.qualified_name} in {table.uri} was deleted. "
            "Run it again: the range is read again."
        ) from error


def _key_texts(rows: pa.ListArray, places: Sequence[int]) -> pa.Array:
    """Return the key of each row as one text."""
    parts = [pc.list_element(rows, place).cast(pa.large_string()) for place in places]
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(
        *parts,
        pa.scalar(_SEPARATOR, pa.large_string()),
        null_handling="replace",
        null_replacement=_NULL,
    )


def _width(rows: pa.RecordBatch) -> int:
    return len(rows.column("new")[0])
