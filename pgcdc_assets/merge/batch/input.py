"""The changes and snapshots of small tables, read from the raw zone by pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge.batch.scope import SmallMerge
from pgcdc_assets.merge.batch.spark_fallback import NotInScope
from pgcdc_assets.raw.delta.scan import DataFile, data_files, scan, scan_changes
from pgcdc_assets.raw.schema import CHANGES
from pgcdc_assets.raw.snapshots import SnapshotIdentity, snapshot_of_file
from pgcdc_assets.raw.zone import RawZone

_COLUMNS = (
    "commit_lsn ordinal commit_ts op relation_id relation_version old_kind old new unchanged"
).split()
_FOLDED = ["I", "U", "D"]
_SCHEMA = pa.schema([CHANGES.field(name) for name in _COLUMNS])

# The bound of the changes and snapshots that are in memory at once.
MOST_BYTES = 64 * 1024 * 1024


class TooLarge(NotInScope):
    """The changes and snapshots exceed the bound. The log has their compressed sizes only."""

    def __init__(self) -> None:
        super().__init__(f"its changes have more than {MOST_BYTES:,} bytes in memory")


def read_input(
    zone: RawZone, merges: Sequence[SmallMerge]
) -> tuple[list[pa.Table], list[pa.Array | None]]:
    """Read the changes of each merge, and the tuples of its snapshot; None without a snapshot.

    Raises:
        TooLarge: they exceed `MOST_BYTES`.
        Incomplete: the changes are not those that were counted.
        RawZoneError: a file is missing or damaged.
        TransientError: another process has replaced and deleted a file.
    """
    budget = _Budget(MOST_BYTES)
    return _read_changes(zone, merges, budget), _read_snapshots(zone, merges, budget)


class Incomplete(NotInScope):
    """The changes that were read are not those that were counted."""

    def __init__(self) -> None:
        super().__init__("the changes that were read are not those that were counted")


class _Budget:
    """The bytes that may still be read."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self._left -= batch.nbytes
            if self._left < 0:
                raise TooLarge
            yield batch


def _read_changes(zone: RawZone, merges: Sequence[SmallMerge], budget: _Budget) -> list[pa.Table]:
    """Read the inserts, updates and deletes of each merge: one scan for each range."""
    ranges: dict[LsnWindow, list[int]] = {}
    for number, merge in enumerate(merges):
        if merge.fold is not None:
            plan = merge.task.plan
            within = LsnWindow(plan.epoch, plan.first_change, plan.end)
            ranges.setdefault(within, []).append(number)
    found = [_SCHEMA.empty_table()] * len(merges)
    for within, numbers in ranges.items():
        wanted = {merges[number].task.followed.relation_id for number in numbers}
        batches = scan_changes(
            zone.changes.table,
            epoch=within.epoch,
            start=within.start,
            end=within.end,
            relation_ids=wanted,
            columns=_COLUMNS,
        )
        rows = pa.Table.from_batches(list(budget.take(batches)), _SCHEMA)
        # A row that cannot be decoded (P) is in the snapshot that follows it.
        rows = rows.filter(pc.field("op").isin(_FOLDED)).combine_chunks()
        ids = rows.column("relation_id").to_numpy()
        order = np.argsort(ids, kind="stable")
        rows, ids = rows.take(pa.array(order)), ids[order]
        for number in numbers:
            relation_id = merges[number].task.followed.relation_id
            start, end = np.searchsorted(ids, [relation_id, relation_id + 1])
            own = rows.slice(start, end - start)
            _check_complete(own, merges[number])
            found[number] = _after_truncate(own, merges[number])
    return found


def _check_complete(rows: pa.Table, merge: SmallMerge) -> None:
    """Check that the second read of the raw zone has found what the first read has counted.

    Raises:
        Incomplete: the numbers of rows differ.
    """
    stats = merge.task.stats
    if stats is not None and rows.num_rows != sum(stats.counts.get(op, 0) for op in _FOLDED):
        raise Incomplete


def _after_truncate(rows: pa.Table, merge: SmallMerge) -> pa.Table:
    """Return the changes after the last TRUNCATE."""
    stats = merge.task.stats
    if stats is None or not stats.truncates:
        return rows
    last = stats.truncates[-1]
    lsn, ordinal = pc.field("commit_lsn"), pc.field("ordinal")
    return rows.filter(
        (lsn > last.commit_lsn) | ((lsn == last.commit_lsn) & (ordinal > last.ordinal))
    )


def _read_snapshots(
    zone: RawZone, merges: Sequence[SmallMerge], budget: _Budget
) -> list[pa.Array | None]:
    """Read the tuples of the snapshot of each merge; None for a merge without a snapshot."""
    if not any(merge.task.plan.snapshot is not None for merge in merges):
        return [None] * len(merges)
    table = zone.snapshots.table
    loaded = table.newest()
    by_snapshot: dict[SnapshotIdentity, list[DataFile]] = {}
    for file in [] if loaded is None else data_files(loaded):
        by_snapshot.setdefault(snapshot_of_file(file).identity, []).append(file)
    found: list[pa.Array | None] = []
    for merge in merges:
        snapshot = merge.task.plan.snapshot
        if snapshot is None:
            found.append(None)
            continue
        files = by_snapshot.get(snapshot.identity, [])
        texts = [batch.column("new") for batch in budget.take(scan(table, files, ["new"]))]
        empty = pa.array([], table.schema.field("new").type)
        found.append(pa.concat_arrays([empty, *texts]))
    return found
