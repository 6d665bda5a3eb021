"""Ends of versions that neither a next version nor a change in the raw zone explains.

A version ends at the position where the next version of its key begins. An end without a next
version means that the row was deleted or lost, and only the raw zone distinguishes the two. Four
events remove a key: a delete, an update that changes the key, a TRUNCATE, and a snapshot without
the key. Without a TRUNCATE or a snapshot, a transaction therefore has at most as many ends without
a next version as deletes and key changes. Each additional end is unexplained.

The rule counts by transaction and not by key. It never reports a correct end, but it misses a wrong
end if the same transaction removed another key whose version did not end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.delta.scan import change_files
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.schema import CHANGES
from pgcdc_assets.raw.table_ends import find_table_ends
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.parquet import read_parquet
from pgcdc_assets.spark.sql import schema_ddl
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify.table_version import TableVersion

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RAW = schema_ddl(CHANGES)


@dataclass(frozen=True)
class ExplainableEnds:
    """The ends that the raw zone can explain.

    Attributes:
        ranges: half-open LSN ranges of an epoch whose changes the raw zone still has.
        removed_at: LSNs at which any key may end: those of snapshots, and the ends of tables that
            another table has replaced.
    """

    schema: str
    table: str
    key: tuple[str, ...]
    ranges: tuple[LsnWindow, ...]
    removed_at: tuple[Lsn, ...]

    def condition_sql(self, column: str) -> str:
        """Write the SQL condition that an end at an LSN is checked."""
        within = _any(f"({column} >= {int(s)} AND {column} < {int(e)})" for _, s, e in self.ranges)
        if not self.removed_at:
            return within
        listed = ", ".join(str(int(lsn)) for lsn in self.removed_at)
        return f"({within} AND {column} NOT IN ({listed}))"


def find_explainable_ends(
    zone: RawZone,
    name: TableName,
    pinned: TableVersion,
    epochs: Sequence[Epoch],
    since: Lsn | None,
) -> ExplainableEnds:
    """Find the ends to check: ends since an LSN whose changes the raw zone still has."""
    ranges = []
    for epoch in epochs:
        watermark = pinned.watermarks.get(epoch.epoch)
        if watermark is None:
            continue
        floor = zone.changes.kept_from(epoch.epoch)
        start = max(epoch.start_lsn, since or Lsn(0), floor or Lsn(0))
        if start < watermark:
            ranges.append(LsnWindow(epoch.epoch, start, watermark))
    snapshots = [copy for copy in zone.snapshots.complete_snapshots() if copy.name == name]
    removed_at = [copy.snapshot_lsn for copy in snapshots]
    for number in sorted({copy.epoch for copy in snapshots}):
        of_epoch = [copy for copy in snapshots if copy.epoch == number]
        if len({copy.relation_id for copy in of_epoch}) > 1:
            removed_at += find_table_ends(zone, of_epoch, zone.source_relations(number))
    return ExplainableEnds(*name, pinned.key, tuple(ranges), tuple(removed_at))


def read_leaving_changes(
    session: SparkSession, zone: RawZone, judged: ExplainableEnds
) -> DataFrame:
    """Read the changes that may have removed a key: `commit_lsn` and `is_truncate`."""
    files = {
        file
        for epoch, start, end in judged.ranges
        for file in change_files(zone.changes.table, epoch, start, end).addresses
    }
    if not files:
        return session.sql("SELECT 0L AS commit_lsn, false AS is_truncate WHERE false")
    within = _any(
        f"(epoch = {epoch} AND commit_lsn >= {int(start)} AND commit_lsn < {int(end)})"
        for epoch, start, end in judged.ranges
    )
    name, ids, versions = TableName(judged.schema, judged.table), [], []
    for epoch in sorted({within.epoch for within in judged.ranges}):
        relations = zone.source_relations(epoch)
        own = relations.relation_ids(name)
        ids += [f"(epoch = {epoch} AND relation_id = {relation_id})" for relation_id in sorted(own)]
        versions += [version for relation_id in own for version in relations.versions(relation_id)]
    changes_key = f"op = 'U' AND old_kind IS NOT NULL AND {_key_changes(versions, judged.key)}"
    return (
        read_parquet(session, sorted(files), _RAW)
        .where(f"{within} AND {_any(ids)} AND (op IN ('D', 'T') OR ({changes_key}))")
        .selectExpr("commit_lsn", "op = 'T' AS is_truncate")
    )


def _key_changes(versions: Sequence[RelationVersion], key: Sequence[str]) -> str:
    """Write the SQL condition that the key of the old tuple differs; true if unknown."""
    conditions: dict[str, list[str]] = {}
    for version in versions:
        names = [column.name for column in version.relation.columns]
        condition = "true"
        if set(key) <= set(names):
            condition = _any(map(_differs, (names.index(name) for name in key)))
        described = (
            f"(epoch = {version.epoch} AND relation_id = {version.relation.relation_id} "
            f"AND relation_version = {version.version})"
        )
        conditions.setdefault(condition, []).append(described)
    cases = " ".join(f"WHEN {_any(which)} THEN {sql}" for sql, which in conditions.items())
    return f"(CASE {cases} ELSE true END)" if cases else "true"


def _differs(position: int) -> str:
    """Write the SQL condition that two tuples have different texts at a position.

    Unchanged TOAST is NULL in the new tuple.
    """
    is_left_out = f"coalesce(array_contains(unchanged, {position}), false)"
    return f"NOT (get(old, {position}) <=> get(new, {position}) OR {is_left_out})"


def _any(conditions: Iterable[str]) -> str:
    return f"({' OR '.join(conditions) or 'false'})"
