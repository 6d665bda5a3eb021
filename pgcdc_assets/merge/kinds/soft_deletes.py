"""SCD type 1 with deleted rows: one row per key that ever was, as it is or as it last was.

A row in place is what SCD1 has. A deleted one keeps the values and the position of its last change,
and `_deleted_at_lsn` says which commit took it away. A key that comes back takes its row over. What
a table holds does not depend on how its changes were cut into merges, since a key that came and
went within one merge leaves its row as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyspark.sql import DataFrame

from pgcdc_assets.merge.change_stats import Truncation
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.key_range import KeyRange, match_sql
from pgcdc_assets.merge.fold.truncates import count_before_sql, next_truncate_sql
from pgcdc_assets.merge.fold.typed_columns import SnapshotRows, type_snapshot_rows
from pgcdc_assets.merge.fold.versions import AffectedRows, stored_rows, typed_events
from pgcdc_assets.merge.kinds import base
from pgcdc_assets.merge.kinds.base import AccumulatingTable
from pgcdc_assets.merge.write import SOURCE_VIEW, create_or_replace, insert_sql, values_by_name
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.columns import SOFT_DELETE_COLUMNS, SystemColumns
from pgcdc_assets.tables.fence import Step


def in_place(rows: DataFrame) -> DataFrame:
    """Keep the rows that the source has."""
    return rows.where("NOT _deleted")


def changed_events(touched: AffectedRows) -> DataFrame:
    """Give events with their values; a deleted row has none to give."""
    stored = touched.stored
    if touched.rows is None or stored is None:
        return typed_events(touched.events, touched.fold, None, None)
    return typed_events(touched.events, touched.fold, in_place(touched.rows), in_place(stored))


def snapshot_events(copied: SnapshotRows, rows: DataFrame | None) -> DataFrame:
    """Write a snapshot as events at its LSN; a copied row has no commit time in SCD1.

    Args:
        rows: all rows of the table; None when it has none.
    """
    there = None if rows is None else in_place(rows)
    events = base.snapshot_events(copied, there)
    others = [name for name in events.columns if name != "commit_ts"]
    return events.selectExpr(*others, "CAST(NULL AS TIMESTAMP) AS commit_ts")


def last_contents(events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
    """Find what each key last held, and which commit took it away.

    Columns: the key, `value_0` ..., `rescued`, `lsn`, `ordinal`, `commit_ts`, `deleted`,
    `deleted_at_lsn`, and `is_stored`: the row is in the table, and goes.

    Args:
        events: as `versions.typed_events` gives them.
        stored: rows of the table under the keys of the events; None when there are none.
    """
    keys = ", ".join(fold.key_columns)
    kept = [
        *fold.key_columns,
        *(f"value_{i}" for i in range(len(fold.schema.fields))),
        *("rescued", "lsn", "ordinal", "commit_ts"),
    ]
    rows = events.selectExpr(
        *kept, "is_content", "false AS is_stored", "CAST(NULL AS BIGINT) AS gone_at"
    )
    if stored is not None:
        there = stored_rows(stored, fold, "_deleted_at_lsn AS gone_at")
        rows = rows.unionByName(
            there.selectExpr(*kept, "is_content", "true AS is_stored", "gone_at")
        )
    forward = f"OVER (PARTITION BY {keys} ORDER BY is_stored DESC, lsn, ordinal, is_content)"
    backward = f"OVER (PARTITION BY {keys}, is_content ORDER BY is_stored, lsn DESC, ordinal DESC)"
    # Nothing but departures follows the last content.
    gone = "coalesce(gone_at, left_at)"
    truncates = fold.stats.truncates
    if truncates:
        gone = f"coalesce(gone_at, least(left_at, {next_truncate_sql(truncates, 'segment')}.lsn))"
    last = (
        rows.selectExpr("*", f"lead(lsn) {forward} AS left_at", f"row_number() {backward} AS age")
        .where("is_content AND age = 1")
        .selectExpr("*", f"{count_before_sql(truncates)} AS segment")
        .selectExpr(*kept, "is_stored", "gone_at", f"{gone} AS deleted_at_lsn")
    )
    return last.where(
        "NOT is_stored OR (gone_at IS NULL AND deleted_at_lsn IS NOT NULL)"
    ).selectExpr(*kept, "deleted_at_lsn IS NOT NULL AS deleted", "deleted_at_lsn", "is_stored")


def merge_sql(path: str, fold: Fold, key_range: KeyRange | None = None) -> str:
    """Write the MERGE.

    Args:
        key_range: of a part of the table that holds every row to be matched.
    """
    values = values_by_name(fold.schema)
    statement = (
        f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s ON {match_sql(fold, key_range)}\n"
        # No fence by LSN: LSNs of a later epoch may be lower, and these rows follow from the
        # table's own.
        "WHEN MATCHED THEN UPDATE SET "
        f"{', '.join(f't.{name} = {value}' for name, value in values)}\n"
        f"WHEN NOT MATCHED AND NOT s.is_stored THEN {insert_sql(values)}"
    )
    if fold.stats.truncates:
        statement += f"\n{mark_deleted_sql(fold.stats.truncates[0])}"
    return statement


def mark_deleted_sql(truncate: Truncation) -> str:
    """Write the clause that marks every other row in place as deleted by a TRUNCATE."""
    return (
        "WHEN NOT MATCHED BY SOURCE AND NOT t._deleted THEN UPDATE SET "
        f"t._deleted = true, t._deleted_at_lsn = {truncate.commit_lsn}L"
    )


@dataclass(frozen=True)
class SoftDeletes(AccumulatingTable):
    """Writes the current image and keeps deleted rows in it."""

    system: ClassVar[SystemColumns] = SOFT_DELETE_COLUMNS

    def write_first_snapshot(self, copied: SnapshotRows, step: Step) -> None:
        """Make the table of a snapshot."""
        rows = type_snapshot_rows(copied.frame, copied.schema, copied.lsn)
        path, schema = self.task.path, copied.schema
        create_or_replace(path, rows, schema, step, begins_with=copied.key)

    def read_stored(self) -> DataFrame:
        """Read all rows: a deleted one may come back."""
        return self.read_table()

    def snapshot_events(self, copied: SnapshotRows, stored: DataFrame | None) -> DataFrame:
        """Write a snapshot as events."""
        return snapshot_events(copied, stored)

    def changed_events(self, touched: AffectedRows) -> DataFrame:
        """Give changes as events with their values."""
        return changed_events(touched)

    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find what each key last held."""
        return last_contents(events, stored, fold)

    def statement(self, fold: Fold, key_range: KeyRange | None) -> str:
        """Write the MERGE of an outcome."""
        return merge_sql(self.task.path, fold, key_range)

    def truncating(self, truncate: Truncation) -> str:
        """Write the MERGE's clause that marks them."""
        return mark_deleted_sql(truncate)
