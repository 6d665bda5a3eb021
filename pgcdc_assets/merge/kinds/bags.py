"""Tables without a key: their rows as a bag, in which equal rows count, or as a log of changes.

REPLICA IDENTITY FULL brings the whole old row of each update and delete, and Postgres itself means
*one* of the rows that are equal to it. Which one makes no difference to the source, so here it is
always the one that came last: rows of one content are a stack. A row that was put in by the range
and not taken out again is new; a row that was taken out, and that the range had not put in before,
is taken from the table. So the outcome does not depend on how the changes were cut into merges.

`_lsn` and `_ordinal` identify a row of a bag; copied rows have different negative ordinals.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.fold.events import Fold, build_bag
from pgcdc_assets.merge.fold.schema import TableShape
from pgcdc_assets.merge.fold.typed_columns import typed
from pgcdc_assets.merge.fold.versions import comparable
from pgcdc_assets.merge.write import SOURCE_VIEW, insert_clause, values_by_name
from pgcdc_assets.spark.sql import delta_table, identifier, string

MISSING_ROW = "pgcdc: a row that was taken out of a bag is not in it"

_COLUMNS = ("rescued", "lsn", "ordinal", "commit_ts", "is_content")


def copied_rows(copied: DataFrame, shape: TableShape, lsn: Lsn) -> DataFrame:
    """Give the rows of a copy their types and a position each.

    Args:
        copied: one column `new`, in the layout of `shape`.
    """
    keep = [
        f"CAST({int(lsn)} AS BIGINT) AS lsn",
        "-1 - monotonically_increasing_id() AS ordinal",
        "CAST(NULL AS TIMESTAMP) AS commit_ts",
        "'S' AS op",
    ]
    return typed(copied, shape, lambda i: f"new[{i}]", keep)


def fold_bag(changes: DataFrame, fold: Fold, stored: DataFrame | None) -> DataFrame:
    """Fold raw changes to rows to be added and rows of the table to be removed.

    Columns: `c0` ..., `rescued`, `lsn`, `ordinal`, `commit_ts`, `is_content`: a removal has
    only the position of its row. A removal without a row raises `MISSING_ROW` when Spark gets
    there.

    Args:
        stored: the table's rows; None when there were none at the beginning of the range.
    """
    keep = ["commit_lsn AS lsn", "ordinal", "commit_ts", "is_content"]
    rows = typed(build_bag(changes, fold), fold.shape, lambda i: f"tuple[{i}]", keep)
    values = [f"c{i}" for i in range(len(fold.shape.fields))]
    if not fold.facts.old_kinds:
        return rows.select(*values, *_COLUMNS)
    order = "OVER (PARTITION BY content ORDER BY lsn, ordinal, is_content ROWS BETWEEN"
    stacks = (
        rows.selectExpr("*", f"{comparable(fold.shape)} AS content")
        .selectExpr(
            "*",
            f"sum(IF(is_content, 1, -1)) {order} UNBOUNDED PRECEDING AND CURRENT ROW) AS height",
        )
        .selectExpr("*", f"min(height) {order} CURRENT ROW AND UNBOUNDED FOLLOWING) AS lowest")
    )
    added = stacks.where("is_content AND lowest >= height").select(*values, *_COLUMNS)
    wanted = stacks.groupBy("content").agg(F.expr("-min(height) AS wanted")).where("wanted > 0")
    removed = _removed(wanted, stored, fold.shape)
    types = [field.type.ddl for field in fold.shape.fields]
    nothing = [f"CAST(NULL AS {ddl}) AS c{i}" for i, ddl in enumerate(types)]
    return added.unionByName(
        removed.selectExpr(
            *nothing,
            "CAST(NULL AS MAP<STRING, STRING>) AS rescued",
            "lsn",
            "ordinal",
            "CAST(NULL AS TIMESTAMP) AS commit_ts",
            "false AS is_content",
        )
    )


def merge_statement(path: str, shape: TableShape) -> str:
    """Write the MERGE."""
    return (
        f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s\n"
        "ON NOT s.is_content AND t._lsn = s.lsn AND t._ordinal = s.ordinal\n"
        "WHEN MATCHED THEN DELETE\n"
        f"WHEN NOT MATCHED AND s.is_content THEN {insert_clause(values_by_name(shape))}"
    )


def logged_changes(changes: DataFrame, fold: Fold) -> DataFrame:
    """Give each raw change as a row: what it put in, or for a delete what it took out."""
    row = (
        f"CASE op WHEN 'T' THEN NULL WHEN 'D' THEN {fold.old_tuple_in_newest_layout()} "
        f"ELSE {fold.tuple_in_newest_layout()} END AS tuple"
    )
    events = changes.where("op IN ('I', 'U', 'D', 'T')").selectExpr(
        "commit_lsn AS lsn", "ordinal", "commit_ts", "op", row
    )
    keep = ["lsn", "ordinal", "commit_ts", "op"]
    return typed(events, fold.shape, lambda i: f"tuple[{i}]", keep)


def _removed(wanted: DataFrame, stored: DataFrame | None, shape: TableShape) -> DataFrame:
    """Choose the newest rows of each content, as many as were taken out of the table."""
    error = f"raise_error({string(MISSING_ROW)})"
    if stored is None:
        return wanted.selectExpr(f"CAST({error} AS BIGINT) AS lsn", "0L AS ordinal")
    there = stored.selectExpr(
        *(f"{identifier(field.name)} AS c{i}" for i, field in enumerate(shape.fields)),
        "_rescued AS rescued",
        "_lsn",
        "_ordinal",
    ).selectExpr(f"{comparable(shape)} AS stored_content", "_lsn", "_ordinal")
    found = wanted.join(there, on=F.expr("content = stored_content"), how="left")
    age = "row_number() OVER (PARTITION BY content ORDER BY _lsn DESC, _ordinal DESC) AS age"
    return (
        found.selectExpr("*", age, "count(_lsn) OVER (PARTITION BY content) AS available")
        .where("age <= wanted")
        .selectExpr(
            f"IF(available < wanted, CAST({error} AS BIGINT), _lsn) AS lsn", "_ordinal AS ordinal"
        )
    )
