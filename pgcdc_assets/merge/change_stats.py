"""Statistics of the changes to be folded, from one scan of their narrow columns.

A fold leaves out what the changes do not need. The statistics show whether a TRUNCATE, a change of
a key or unchanged TOAST occurred. pyarrow reads the statistics of all tables in one scan, without a
Spark job.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.protocol.arrow_batch import NO_KEY
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.windows.rows import LandedRows
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName

# The operation of a row of a partial snapshot.
COPIED = "S"

_GROUP = ("schema", "table", "relation_id", "relation_version", "op", "old_kind")
_COLUMNS = (*_GROUP, "commit_lsn", "ordinal", "commit_ts", "unchanged")


class FollowedTable(NamedTuple):
    """A declared table, and the OID of the relation whose changes belong to it."""

    table: TableName
    relation_id: int


@dataclass(frozen=True, order=True)
class Truncation:
    """The position and the commit time of a TRUNCATE."""

    commit_lsn: int
    ordinal: int
    commit_ts: dt.datetime


@dataclass
class ChangeStats:
    """The statistics of one table's changes in a range.

    Attributes:
        names: the names at the source under which the changes arrived, each with the commit LSN of
            the first change.
        taken_at: commit LSN of the first change of another relation under the declared name; None
            without one. Which relation the declared name means is not certain from here on.
        counts: rows by operation.
        versions: the last commit LSN of each relation version.
        first_lsns: the first commit LSN of each relation version.
        has_old_tuples: an update brought an old tuple, so a key may have changed.
        old_kinds: kinds of the old tuples of updates and deletes; None for no old tuple.
        unidentified_at: commit LSN of the first old tuple that lacks the key; None without one.
        unchanged: by relation version, the tuple positions that were unchanged TOAST in a change.
        truncates: all TRUNCATEs, in order.
    """

    names: dict[TableName, Lsn] = field(default_factory=dict)
    taken_at: Lsn | None = None
    counts: dict[str, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    first_lsns: dict[int, int] = field(default_factory=dict)
    has_old_tuples: bool = False
    old_kinds: set[str | None] = field(default_factory=set)
    unidentified_at: Lsn | None = None
    unchanged: dict[int, set[int]] = field(default_factory=dict)
    truncates: list[Truncation] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether there were updates or deletes, and all brought their whole old rows."""
        return self.old_kinds == {"O"}

    @property
    def may_leave_and_come(self) -> bool:
        """Whether one change, or a snapshot, may remove the row of a key and add a row."""
        return self.is_full or self.has_old_tuples or not self.counts

    @property
    def change_count(self) -> int:
        """The number of changes."""
        return sum(self.counts.values())

    def schema_steps(self, order: Sequence[int], made_with: int) -> Iterator[tuple[int, int, int]]:
        """Yield the changes of the schema: two relation versions, and the LSN of the first use.

        If version 1 is used before and after version 2, the steps are 1 to 2 and 2 to 1.

        Args:
            order: the versions in the order of their last use.
            made_with: the version of the table.
        """
        used = [(place, version) for place, version in enumerate(order) if version in self.versions]
        uses = [(self.first_lsns[version], place, version) for place, version in used]
        uses += [(self.versions[version], place, version) for place, version in used]
        before = made_with
        for lsn, _, version in sorted(uses):
            if version != before:
                yield before, version, lsn
            before = version


# A table within a range.
TableRange = tuple[LsnWindow, FollowedTable]


class ReadChanges(NamedTuple):
    """What one or several scans have found.

    Attributes:
        stats: of the tables with changes.
        row_counts: how many of the landed rows the raw zone has now; none is 0.
    """

    stats: dict[TableRange, ChangeStats]
    row_counts: dict[LandedRows, int]


def read_change_stats(
    zone: RawZone,
    ranges: Mapping[LsnWindow, Collection[FollowedTable]],
    landed: Collection[LandedRows] = (),
) -> ReadChanges:
    """Count the changes of tables in their ranges.

    Tables that are far behind have different ranges. Overlapping ranges are read in one scan.

    Args:
        ranges: the tables that are folded over each range.
        landed: rows that are counted again. A range may begin or end within a window, so the scan
            also reads the remaining changes of that window.
    """
    found = ReadChanges({}, {})
    for overlapping in _overlapping({*ranges, *(each.within for each in landed)}):
        around = set(overlapping)
        wanted = _Wanted.of(
            {within: ranges.get(within, ()) for within in overlapping},
            [each for each in landed if each.within in around],
        )
        batches = scan_changes(
            zone.changes.table,
            epoch=overlapping[0].epoch,
            start=wanted.bounds[0],
            end=wanted.bounds[-1],
            columns=_COLUMNS,
        )
        for batch in batches:
            _add(found, wanted, pa.Table.from_batches([batch]))
    for stats in found.stats.values():
        stats.truncates.sort()
    return found


def count_snapshot_rows(snapshot: Snapshot) -> ChangeStats:
    """Return the statistics of the rows of a partial snapshot, which are folded like changes."""
    lsn, version = snapshot.snapshot_lsn, snapshot.relation_version
    return ChangeStats(
        counts={COPIED: snapshot.row_count},
        versions={version: lsn},
        first_lsns={version: lsn},
    )


def versions_in_order(
    zone: RawZone, within: LsnWindow, relation_id: int, stats: ChangeStats
) -> list[int]:
    """List the relation versions of a range in the order of their last use."""
    last = stats.versions
    if len(set(last.values())) == len(last):
        return sorted(last, key=lambda version: last[version])
    # Several versions in one transaction: the ordinals decide.
    epoch, start, end = within
    positions: dict[int, tuple[int, int]] = {}
    for batch in scan_changes(
        zone.changes.table,
        epoch=epoch,
        start=start,
        end=end,
        names=stats.names,
        relation_id=relation_id,
        columns=("relation_version", "commit_lsn", "ordinal", "op"),
    ):
        rows = batch.filter(pc.field("op") != "T")
        for version in pc.unique(rows.column("relation_version")).to_pylist():
            own = rows.filter(pc.field("relation_version") == version)
            lsn = pc.max(own.column("commit_lsn")).as_py()
            ordinal = pc.max(own.filter(pc.field("commit_lsn") == lsn).column("ordinal")).as_py()
            positions[version] = max((lsn, ordinal), positions.get(version, (0, 0)))
    return sorted(positions, key=lambda version: positions[version])


def _overlapping(ranges: Collection[LsnWindow]) -> list[list[LsnWindow]]:
    """Group ranges of one epoch that overlap, directly or by others between them."""
    groups: list[list[LsnWindow]] = []
    epoch, end = 0, Lsn(0)
    for within in sorted(ranges):
        if within.epoch != epoch or within.start >= end:
            groups.append([])
            epoch, end = within.epoch, within.end
        groups[-1].append(within)
        end = max(end, within.end)
    return groups


@dataclass(frozen=True)
class _Wanted:
    """The tables of overlapping ranges by OID and by declared name.

    Attributes:
        bounds: the starts and ends of all ranges, in order. Part n is from bound n to the next one.
        parts: for each range, its first part and the part behind its last one.
        landed: the rows that are counted again, by each of their names.
    """

    bounds: Sequence[int]
    parts: Mapping[LsnWindow, tuple[int, int]]
    by_id: Mapping[int, list[TableRange]]
    by_name: Mapping[TableName, list[TableRange]]
    landed: Mapping[TableName, list[LandedRows]]

    @classmethod
    def of(
        cls,
        ranges: Mapping[LsnWindow, Collection[FollowedTable]],
        landed: Collection[LandedRows],
    ) -> _Wanted:
        bounds = sorted({int(lsn) for within in ranges for lsn in (within.start, within.end)})
        place = {lsn: number for number, lsn in enumerate(bounds)}
        parts = {each: (place[each.start], place[each.end]) for each in ranges}
        by_id: dict[int, list[TableRange]] = {}
        by_name: dict[TableName, list[TableRange]] = {}
        for within, tables in ranges.items():
            for table in tables:
                by_id.setdefault(table.relation_id, []).append((within, table))
                by_name.setdefault(table.table, []).append((within, table))
        by_landed_name: dict[TableName, list[LandedRows]] = {}
        for each in landed:
            for name in each.names:
                by_landed_name.setdefault(name, []).append(each)
        return cls(bounds, parts, by_id, by_name, by_landed_name)

    def with_parts(self, rows: pa.Table) -> pa.Table:
        """Add the column `part`: the number of the part with the row's commit LSN."""
        lsns = rows.column("commit_lsn").to_numpy()
        part = np.searchsorted(self.bounds, lsns, side="right") - 1
        return rows.append_column("part", pa.array(part, pa.int32()))

    def of_row(self, row: Mapping[str, Any]) -> Iterator[TableRange]:
        """Yield the ranges and tables that a row belongs to."""
        for found in self.by_id.get(row["relation_id"], []):
            if self._has(row, found[0]):
                yield found

    def taken_by(self, row: Mapping[str, Any]) -> Iterator[TableRange]:
        """Yield the ranges and tables whose declared name a row of another relation has."""
        for found in self.by_name.get(TableName(row["schema"], row["table"]), []):
            if found[1].relation_id != row["relation_id"] and self._has(row, found[0]):
                yield found

    def landed_with(self, row: Mapping[str, Any]) -> Iterator[LandedRows]:
        """Yield the landed rows that a row belongs to."""
        for landed in self.landed.get(TableName(row["schema"], row["table"]), []):
            if self._has(row, landed.within):
                yield landed

    def _has(self, row: Mapping[str, Any], within: LsnWindow) -> bool:
        first, behind = self.parts[within]
        part: int = row["part"]
        return first <= part < behind


def _add(read: ReadChanges, wanted: _Wanted, rows: pa.Table) -> None:
    rows, stats = wanted.with_parts(rows), read.stats
    counted = rows.group_by([*_GROUP, "part"], use_threads=False).aggregate(
        [([], "count_all"), ("commit_lsn", "min"), ("commit_lsn", "max")]
    )
    for group in counted.to_pylist():
        for landed in wanted.landed_with(group):
            read.row_counts[landed] = read.row_counts.get(landed, 0) + group["count_all"]
        for table in wanted.of_row(group):
            _count(stats.setdefault(table, ChangeStats()), group)
        for table in wanted.taken_by(group):
            found = stats.setdefault(table, ChangeStats())
            first = Lsn(group["commit_lsn_min"])
            found.taken_at = min(first, found.taken_at or first)
    for row in rows.filter(pc.field("op") == "T").to_pylist():
        for table in wanted.of_row(row):
            truncation = Truncation(row["commit_lsn"], row["ordinal"], row["commit_ts"])
            stats[table].truncates.append(truncation)
    for row in _unchanged_positions(rows):
        for table in wanted.of_row(row):
            positions = stats[table].unchanged.setdefault(row["relation_version"], set())
            positions.add(row["position"])


def _count(found: ChangeStats, group: Mapping[str, Any]) -> None:
    op, version = group["op"], group["relation_version"]
    name, first = TableName(group["schema"], group["table"]), Lsn(group["commit_lsn_min"])
    found.names[name] = min(first, found.names.get(name, first))
    found.counts[op] = found.counts.get(op, 0) + group["count_all"]
    if op == "T":
        return
    found.versions[version] = max(found.versions.get(version, 0), group["commit_lsn_max"])
    found.first_lsns[version] = min(found.first_lsns.get(version, first), first)
    found.has_old_tuples |= op == "U" and group["old_kind"] is not None
    if op in "UD":
        found.old_kinds.add(group["old_kind"])
    if group["old_kind"] == NO_KEY:
        found.unidentified_at = min(first, found.unidentified_at or first)


def _unchanged_positions(rows: pa.Table) -> list[dict[str, Any]]:
    rows = rows.filter(pc.is_valid(pc.field("unchanged")))
    if rows.num_rows == 0:
        return []
    unchanged = rows.column("unchanged").combine_chunks()
    parents = rows.select(["relation_id", "relation_version", "part"]).take(
        pc.list_parent_indices(unchanged)
    )
    flat = parents.append_column("position", pc.list_flatten(unchanged))
    names = flat.column_names
    distinct: list[dict[str, Any]] = (
        flat.group_by(names, use_threads=False).aggregate([]).to_pylist()
    )
    return distinct
