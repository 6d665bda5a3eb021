"""Which event of a key decides what the key holds after the range.

Under DEFAULT and USING INDEX identities it is the newest one: such an index is never deferrable, so
at every moment at most one row has a key.

Under REPLICA IDENTITY FULL the key may belong to a deferrable constraint, and within a transaction
two rows may have one key: to swap 1 and 2 is to send `1 -> 2`, then `2 -> 1`, and the newest event
of key 2 is a departure although a row with key 2 remains. But every change brings its whole old
row, so rows can be counted as in a bag: a change takes the old row out of its key and puts the new
one in. A row that was put in last, or more often than it was taken out, is what its key holds in
the end. Where there is none, the key has lost its row if some row was taken out more often than put
in, since it must have been there before the range; else the key is as it was.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.merge.fold.events import Fold


def keep_newest_per_key(events: DataFrame, fold: Fold) -> DataFrame:
    """Keep the newest event of each key.

    Where a departure and a content of one key stand at one position (two texts of one value, such
    as a float's 0 and -0), the content is what remains.
    """
    keys = ", ".join(fold.key_columns)
    age = (
        f"row_number() OVER (PARTITION BY {keys} "
        "ORDER BY commit_lsn DESC, ordinal DESC, is_content DESC)"
    )
    return events.selectExpr("*", f"{age} AS age").where("age = 1").drop("age")


def keep_bag_remainder(bag: DataFrame, fold: Fold, *further: str) -> DataFrame:
    """Keep per key the row that was put in last, or the fact that its row is gone.

    Args:
        further: more columns that with the key make a group; they are kept.
    """
    keys = [*fold.key_columns, *further]
    aggregates = [
        F.expr("sum(IF(is_content, 1, -1)) AS balance"),
        F.expr("max(struct(commit_lsn, ordinal, is_content, commit_ts, op)) AS last"),
        F.expr(
            "max(struct(commit_lsn, ordinal, commit_ts, op)) FILTER (WHERE is_content) "
            "AS last_put_in"
        ),
    ]
    if len(fold.common_fields) == len(fold.schema.fields):
        rows = bag.groupBy(*keys, "tuple").agg(*aggregates)
    else:
        # A row that was put in before a column was added is taken out with the column's default.
        common = f"array({', '.join(f'tuple[{i}]' for i in fold.common_fields)})"
        newest = "max_by(tuple, struct(commit_lsn, ordinal)) FILTER (WHERE is_content) AS tuple"
        rows = (
            bag.selectExpr("*", f"{common} AS told_by")
            .groupBy(*keys, "told_by")
            .agg(*aggregates, F.expr(newest))
        )
    is_held = "(last.is_content OR balance > 0)"
    decided = rows.groupBy(*keys).agg(
        F.expr(f"max(struct(last_put_in AS at, tuple)) FILTER (WHERE {is_held}) AS held"),
        F.expr("max(struct(last.commit_lsn, last.ordinal, last.commit_ts, last.op)) AS newest"),
        F.expr("bool_or(balance < 0) AS has_lost"),
    )
    return decided.where("held IS NOT NULL OR has_lost").selectExpr(
        *keys,
        "coalesce(held.at, newest).commit_lsn AS commit_lsn",
        "coalesce(held.at, newest).ordinal AS ordinal",
        "coalesce(held.at, newest).commit_ts AS commit_ts",
        "coalesce(held.at, newest).op AS op",
        "held IS NOT NULL AS is_content",
        "held.tuple AS tuple",
    )
