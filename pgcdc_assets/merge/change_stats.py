"""What the changes to be folded look like, counted in one pass over their narrow columns.

The fold's plain path is cheap because it leaves out what the changes do not need: no row was
truncated, no key changed, nothing was left out as unchanged TOAST. These stats say which parts a
table's merge needs. They are read by pyarrow, all tables in one scan, so that they cost no Spark
job.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.raw.scan import scan_changes
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName

_GROUP = ("schema", "table", "relation_id", "relation_version", "op", "old_kind")
_COLUMNS = (*_GROUP, "commit_lsn", "ordinal", "commit_ts", "unchanged")


@dataclass(frozen=True, order=True)
class Truncation:
    """Where a TRUNCATE stands in the stream, and when it was committed."""

    commit_lsn: int
    ordinal: int
    commit_ts: dt.datetime


@dataclass
class ChangeStats:
    """The changes of one table in a range.

    Attributes:
        counts: rows by operation.
        versions: per relation version the commit LSN that last used it.
        has_old_tuples: some update brought an old tuple: its key may have changed.
        old_kinds: kinds of old tuples that updates and deletes brought; None for none.
        unchanged: per relation version the tuple positions that were ever unchanged TOAST.
        truncates: every TRUNCATE, in order.
    """

    relation_ids: set[int] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    has_old_tuples: bool = False
    old_kinds: set[str | None] = field(default_factory=set)
    unchanged: dict[int, set[int]] = field(default_factory=dict)
    truncates: list[Truncation] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether every update and delete brought its whole old row, and there was one."""
        return self.old_kinds == {"O"}

    @property
    def may_leave_and_come(self) -> bool:
        """Whether one change, or a snapshot, may take a key's row out and put one in."""
        return self.is_full or self.has_old_tuples or not self.counts

    @property
    def change_count(self) -> int:
        """All rows of the range."""
        return sum(self.counts.values())


def read_change_stats(
    zone: RawZone, ranges: Mapping[LsnWindow, Collection[TableName]]
) -> dict[tuple[LsnWindow, TableName], ChangeStats]:
    """Count the changes of tables in their ranges: one scan for each range.

    Args:
        ranges: per epoch, start and end the tables (schema, table) that are folded over it.
    """
    found: dict[tuple[LsnWindow, TableName], ChangeStats] = {}
    for within, tables in sorted(ranges.items()):
        stats: dict[TableName, ChangeStats] = {}
        batches = scan_changes(
            zone.changes.table,
            epoch=within.epoch,
            start=within.start,
            end=within.end,
            columns=_COLUMNS,
        )
        for batch in batches:
            _add(stats, tables, pa.Table.from_batches([batch]))
        for table, own in stats.items():
            own.truncates.sort()
            found[within, table] = own
    return found


def versions_in_order(
    zone: RawZone, within: LsnWindow, table: TableName, stats: ChangeStats
) -> list[int]:
    """List the relation versions of a range by when the stream last used them."""
    last = stats.versions
    if len(set(last.values())) == len(last):
        return sorted(last, key=lambda version: last[version])
    # Several shapes in one transaction: its ordinals decide.
    epoch, start, end = within
    positions: dict[int, tuple[int, int]] = {}
    for batch in scan_changes(
        zone.changes.table,
        epoch=epoch,
        start=start,
        end=end,
        source=table,
        columns=("relation_version", "commit_lsn", "ordinal", "op"),
    ):
        rows = batch.filter(pc.field("op") != "T")
        for version in pc.unique(rows.column("relation_version")).to_pylist():
            own = rows.filter(pc.field("relation_version") == version)
            lsn = pc.max(own.column("commit_lsn")).as_py()
            ordinal = pc.max(own.filter(pc.field("commit_lsn") == lsn).column("ordinal")).as_py()
            positions[version] = max((lsn, ordinal), positions.get(version, (0, 0)))
    return sorted(positions, key=lambda version: positions[version])


def _add(
    stats: dict[TableName, ChangeStats], wanted: Collection[TableName], rows: pa.Table
) -> None:
    counted = rows.group_by(list(_GROUP), use_threads=False).aggregate(
        [([], "count_all"), ("commit_lsn", "max")]
    )
    for group in _of(wanted, counted.to_pylist()):
        found = stats.setdefault(TableName(group["schema"], group["table"]), ChangeStats())
        op, version = group["op"], group["relation_version"]
        found.relation_ids.add(group["relation_id"])
        found.counts[op] = found.counts.get(op, 0) + group["count_all"]
        if op == "T":
            continue
        found.versions[version] = max(found.versions.get(version, 0), group["commit_lsn_max"])
        found.has_old_tuples |= op == "U" and group["old_kind"] is not None
        if op in "UD":
            found.old_kinds.add(group["old_kind"])
    for row in _of(wanted, rows.filter(pc.field("op") == "T").to_pylist()):
        found = stats[TableName(row["schema"], row["table"])]
        found.truncates.append(Truncation(row["commit_lsn"], row["ordinal"], row["commit_ts"]))
    for row in _of(wanted, _unchanged_positions(rows)):
        found = stats[TableName(row["schema"], row["table"])]
        found.unchanged.setdefault(row["relation_version"], set()).add(row["position"])


def _unchanged_positions(rows: pa.Table) -> list[dict[str, Any]]:
    rows = rows.filter(pc.is_valid(pc.field("unchanged")))
    if rows.num_rows == 0:
        return []
    unchanged = rows.column("unchanged").combine_chunks()
    parents = rows.select(["schema", "table", "relation_version"]).take(
        pc.list_parent_indices(unchanged)
    )
    flat = parents.append_column("position", pc.list_flatten(unchanged))
    names = flat.column_names
    distinct: list[dict[str, Any]] = (
        flat.group_by(names, use_threads=False).aggregate([]).to_pylist()
    )
    return distinct


def _of(wanted: Collection[TableName], rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (row for row in rows if (row["schema"], row["table"]) in wanted)
