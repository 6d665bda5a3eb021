"""SCD type 1: one row per key, as it is now.

A copy replaces the contents. Changes are folded to one row per key and applied by one MERGE; where
the table is empty, or a TRUNCATE emptied it in the range, there is nothing to match and the rows
are written as they are. Each of these is one Delta commit that carries fence and watermark, so
Delta recognises a repeat and leaves it out.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.fold.events import Fold, build_bag, build_events
from pgcdc_assets.merge.fold.key_range import Bounds, key_bounds, matched
from pgcdc_assets.merge.fold.latest import left_in_bag, newest_per_key
from pgcdc_assets.merge.fold.schema import TableShape
from pgcdc_assets.merge.fold.toast import follow_key_changes, with_known_values
from pgcdc_assets.merge.fold.typed_columns import typed
from pgcdc_assets.merge.fold.unknown import fetch_unknown, joined_rescued, value_or_error
from pgcdc_assets.merge.write import NEWER, SOURCE_VIEW, compute_once, insert_clause, run_merge
from pgcdc_assets.spark.sql import delta_table, identifier
from pgcdc_assets.tables.fence import Step


def copied_rows(copied: DataFrame, shape: TableShape, lsn: Lsn) -> DataFrame:
    """Give the rows of a copy their types and the copy's position.

    Args:
        copied: one column `new`, in the layout of `shape`.
        lsn: the copy's snapshot LSN.
    """
    keep = [
        f"CAST({int(lsn)} AS BIGINT) AS lsn",
        "CAST(-1 AS BIGINT) AS ordinal",
        "CAST(NULL AS TIMESTAMP) AS commit_ts",
        "false AS deleted",
        "CAST(NULL AS BIGINT) AS deleted_at_lsn",
    ]
    return typed(copied, shape, lambda i: f"new[{i}]", keep)


def fold_changes(changes: DataFrame, fold: Fold, stored: DataFrame | None) -> DataFrame:
    """Fold raw changes to one row per key: what the key holds after them.

    Columns: `k0` ..., `c0` ..., `rescued`, `lsn`, `ordinal`, `commit_ts`, `is_content` and, where a
    change left something out, `unknown`: fields to be taken from the table's row.

    Args:
        stored: the table's rows; None when there were none at the beginning of the range.
    """
    keep = [*fold.key_columns, "commit_lsn AS lsn", "ordinal", "commit_ts", "is_content"]
    if not fold.unknown:
        if fold.facts.is_full:
            winners = left_in_bag(build_bag(changes, fold), fold)
        else:
            winners = newest_per_key(build_events(changes, fold), fold)
        return typed(winners, fold.shape, lambda i: f"tuple[{i}]", keep)
    events = with_known_values(build_events(changes, fold), fold)
    winners = follow_key_changes(newest_per_key(events, fold), events, fold)
    origin = fold.named("o", "u")
    rows = typed(winners, fold.shape, fold.known_text, [*keep, "unknown", "is_elsewhere", *origin])
    if stored is None or not fold.facts.has_old_tuples:
        return rows
    return fetch_unknown(rows, fold, stored, "_lsn")


def rows_alone(rows: DataFrame, fold: Fold) -> DataFrame:
    """Make of folded rows the whole contents of a table: there is no row to take anything from."""
    rows = rows.where("is_content")
    if fold.unknown:
        width = range(len(fold.shape.fields))
        others = [n for n in rows.columns if n not in {f"c{i}" for i in fold.unknown}]
        known = [f"{value_or_error(fold, i, '')} AS c{i}" for i in fold.unknown]
        rows = rows.selectExpr(*others, *known).select(
            *(f"c{i}" for i in width), "rescued", "lsn", "ordinal", "commit_ts"
        )
    return rows


def merge_rows(
    spark: SparkSession,
    path: str,
    rows: DataFrame,
    fold: Fold,
    step: Step,
    *,
    is_large: bool,
) -> tuple[int, int, int]:
    """Apply folded rows by one MERGE; give the counts of inserted, updated and deleted rows.

    Args:
        is_large: the table is worth finding out which part of it the rows concern.
    """
    if not is_large:
        return run_merge(spark, rows, merge_statement(path, fold), step)
    rows = compute_once(rows)
    statement = merge_statement(path, fold, key_bounds(rows, fold))
    return run_merge(spark, rows, statement, step, is_computed=True)


def merge_statement(path: str, fold: Fold, bounds: Bounds | None = None) -> str:
    """Write the MERGE.

    Args:
        bounds: of a part of the table that holds every row to be matched.
    """
    fields = fold.shape.fields
    updates = []
    inserts = []
    for i, field in enumerate(fields):
        name = identifier(field.name)
        mine = f"s.c{i}"
        if i in fold.unknown:
            mine = f"IF(coalesce(array_contains(s.unknown, {i}), false), t.{name}, s.c{i})"
        updates.append(f"t.{name} = {mine}")
        inserts.append((name, value_or_error(fold, i, "s.")))
    rescued = "s.rescued"
    if fold.unknown:
        rescued = f"IF(s.unknown IS NULL, s.rescued, {joined_rescued(fold)})"
    system = {"_lsn": "s.lsn", "_ordinal": "s.ordinal", "_commit_ts": "s.commit_ts"}
    updates += [f"t.{name} = {value}" for name, value in system.items()]
    updates.append(f"t._rescued = {rescued}")
    inserts += [*system.items(), ("_rescued", "s.rescued")]
    return (
        f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s ON {matched(fold, bounds)}\n"
        f"WHEN MATCHED AND {NEWER} AND NOT s.is_content THEN DELETE\n"
        f"WHEN MATCHED AND {NEWER} THEN UPDATE SET {', '.join(updates)}\n"
        f"WHEN NOT MATCHED AND s.is_content THEN {insert_clause(inserts)}"
    )
