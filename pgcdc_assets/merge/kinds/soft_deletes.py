"""SCD type 1 with soft deletes: one row per key that ever existed.

A row that exists at the source equals the row of SCD1. A deleted row keeps the values and the
position of its last change, and `_deleted_at_lsn` is the commit LSN of the delete. A new row with
the key replaces the deleted row. The contents do not depend on how the changes are divided into
merges: a key that is inserted and deleted within one merge also has a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.merge.change_stats import Truncation
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.key_range import KeyRange, match_sql
from pgcdc_assets.merge.fold.truncates import count_before_sql, next_truncate_sql
from pgcdc_assets.merge.fold.typed_columns import SnapshotRows, type_snapshot_rows
from pgcdc_assets.merge.fold.versions import AffectedRows, stored_rows, typed_events
from pgcdc_assets.merge.kinds import accumulating
from pgcdc_assets.merge.kinds.accumulating import AccumulatingTable
from pgcdc_assets.merge.kinds.changed_key import key_values
from pgcdc_assets.merge.opened_table import stored_key
from pgcdc_assets.merge.write import (
    SOURCE_VIEW,
    create_or_replace,
    insert_sql,
    overwrite,
    values_by_name,
)
from pgcdc_assets.spark.sql import delta_table, identifier
from pgcdc_assets.tables.columns import (
    DELETED,
    DELETED_AT_LSN,
    LSN,
    ORDINAL,
    SOFT_DELETE_COLUMNS,
    SystemColumns,
    unused_names,
)
from pgcdc_assets.tables.fence import Step


def in_place(rows: DataFrame) -> DataFrame:
    """Keep the rows that exist at the source."""
    return rows.where("NOT _deleted")


def changed_events(touched: AffectedRows) -> DataFrame:
    """Return events with typed values; unknown values never come from deleted rows."""
    stored = touched.stored
    if touched.rows is None or stored is None:
        return typed_events(touched.events, touched.fold, None, None)
    return typed_events(touched.events, touched.fold, in_place(touched.rows), in_place(stored))


def snapshot_events(copied: SnapshotRows, rows: DataFrame | None) -> DataFrame:
    """Turn a snapshot into events at its LSN; a row of a snapshot has no commit time in SCD1.

    Args:
        rows: all rows of the table; None for an empty table.
    """
    there = None if rows is None else in_place(rows)
    events = accumulating.snapshot_events(copied, there)
    others = [name for name in events.columns if name != "commit_ts"]
    return events.selectExpr(*others, "CAST(NULL AS TIMESTAMP) AS commit_ts")


def last_contents(events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
    """Find the last row of each key, and the commit that deleted the row.

    Columns: the key, `value_0` ..., `rescued`, `lsn`, `ordinal`, `commit_ts`, `deleted`,
    `deleted_at_lsn`, and `is_stored`: the row is in the table, and is deleted now.

    Args:
        events: as `versions.typed_events` gives them.
        stored: rows of the table with the keys of the events; None if there are none.
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
    # Only departures follow the last content.
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
    """Write the MERGE statement. For a table with columns `id` (the key) and `n` it is

        MERGE INTO delta.`/lake/shop/scd1/public/t` t USING pgcdc_source s ON t.`id` = s.key_0
        WHEN MATCHED THEN UPDATE SET t.`id` = s.value_0, t.`n` = s.value_1, t._lsn = s.lsn, ...
        WHEN NOT MATCHED AND NOT s.is_stored THEN INSERT (`id`, `n`, _lsn, ...)
            VALUES (s.value_0, s.value_1, s.lsn, ...)

    Args:
        key_range: a part of the table that contains every row to be matched.
    """
    values = values_by_name(fold.schema)
    statement = (
        f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s ON {match_sql(fold, key_range)}\n"
        # No comparison of LSNs: LSNs of a later epoch may be lower, and these rows were
        # computed from the rows of the table.
        "WHEN MATCHED THEN UPDATE SET "
        f"{', '.join(f't.{name} = {value}' for name, value in values)}\n"
        f"WHEN NOT MATCHED AND NOT s.is_stored THEN {insert_sql(values)}"
    )
    if fold.stats.truncates:
        statement += f"\n{mark_deleted_sql(fold.stats.truncates[0])}"
    return statement


def mark_deleted_sql(truncate: Truncation) -> str:
    """Return the clause that marks every other existing row as deleted by a TRUNCATE."""
    return (
        "WHEN NOT MATCHED BY SOURCE AND NOT t._deleted THEN UPDATE SET "
        f"t._deleted = true, t._deleted_at_lsn = {truncate.commit_lsn}L"
    )


@dataclass(frozen=True)
class SoftDeletes(AccumulatingTable):
    """The writer of a current image with soft deletes."""

    system: ClassVar[SystemColumns] = SOFT_DELETE_COLUMNS

    def write_first_snapshot(self, copied: SnapshotRows, step: Step) -> None:
        """Create the table from a snapshot."""
        rows = type_snapshot_rows(copied.frame, copied.schema, copied.lsn)
        path, schema = self.task.path, copied.schema
        create_or_replace(path, rows, schema, step, begins_with=copied.key)

    def read_stored(self) -> DataFrame:
        """Read all rows: the key of a deleted row may be inserted again."""
        return self.read_table()

    def end_rows_without_key(
        self, key: Sequence[str | None], copied: SnapshotRows, step: Step
    ) -> None:
        """Mark the rows that the columns of a new key do not identify as deleted.

        Of several deleted rows with one value of the new key, the last one is kept.
        """
        lsn = int(copied.rows_end.lsn)
        rows = self.read_table()
        if None in key:
            is_lost, is_kept = "NOT _deleted", "true"
        else:
            values = key_values([name for name in key if name is not None])
            of_key = f"PARTITION BY {', '.join(f'struct({each.sql})' for each in values)}"
            is_null = " OR ".join(each.is_null for each in values)
            before = [n for n in stored_key(self.task.state) if n in rows.columns]
            lacks_key, rows_of_key, place = unused_names(3, rows.columns)
            order = [DELETED, f"{LSN} DESC", f"{ORDINAL} DESC", *map(identifier, before)]
            rows = rows.selectExpr(
                "*",
                f"({is_null}) AS {lacks_key}",
                f"count_if(NOT _deleted) OVER ({of_key}) AS {rows_of_key}",
                f"row_number() OVER ({of_key} ORDER BY {', '.join(order)}) AS {place}",
            )
            is_lost = f"NOT _deleted AND ({lacks_key} OR {rows_of_key} > 1)"
            is_kept = f"{lacks_key} OR {place} = 1"
        changed = {
            DELETED: f"_deleted OR ({is_lost})",
            DELETED_AT_LSN: f"IF({is_lost}, {lsn}L, _deleted_at_lsn)",
        }
        columns = [
            F.expr(changed.get(name, identifier(name))).alias(name)
            for name in self.read_table().columns
        ]
        overwrite(rows.where(is_kept).select(*columns), self.task.path, step)

    def snapshot_events(self, copied: SnapshotRows, stored: DataFrame | None) -> DataFrame:
        """Write a snapshot as events."""
        return snapshot_events(copied, stored)

    def changed_events(self, touched: AffectedRows) -> DataFrame:
        """Return changes as events with typed values."""
        return changed_events(touched)

    def outcome(self, events: DataFrame, stored: DataFrame | None, fold: Fold) -> DataFrame:
        """Find the last row of each key."""
        return last_contents(events, stored, fold)

    def merge_sql(self, fold: Fold, key_range: KeyRange | None) -> str:
        """Return the MERGE statement of an outcome."""
        return merge_sql(self.task.path, fold, key_range)

    def truncation_sql(self, truncate: Truncation) -> str:
        """Return the clause that marks the rows before a TRUNCATE."""
        return mark_deleted_sql(truncate)
