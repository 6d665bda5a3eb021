"""Which event of a key decides what the key holds after the range.

Under DEFAULT and USING INDEX identities it is the newest one: such an index is never deferrable, so
at every moment at most one row has a key.

Under REPLICA IDENTITY FULL the key may belong to a deferrable constraint, and within a transaction
two rows may have one key: `swap 1 and 2` sends `1 -> 2`, then `2 -> 1`, and the newest event of key
2 is a departure although a row with key 2 remains. At each commit, though, a key has one row or
none. So the events of a key in one transaction are balanced: rows before + arrivals - departures is
what remains, and where it is one row, it is the one that came last (of two rows at a key, the older
leaves first).
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.merge.events import Fold


def choose_winners(events: DataFrame, fold: Fold) -> DataFrame:
    """Keep one event per key.

    The result has the events' columns and `needs_presence`: the content counts only if the key had
    a row before the range.
    """
    if fold.facts.has_full_tuples:
        return _by_balance(events, fold)
    return _newest(events, fold).selectExpr("*", "false AS needs_presence")


def _newest(events: DataFrame, fold: Fold) -> DataFrame:
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


def _by_balance(events: DataFrame, fold: Fold) -> DataFrame:
    """Keep the event that the balance of each transaction leaves."""
    keys = list(fold.key_columns)
    transactions = events.groupBy(*keys, "commit_lsn").agg(
        F.expr("max(struct(ordinal, is_content)).is_content AS ends_with_content"),
        F.expr("count_if(is_content AND is_arrival) - count_if(NOT is_content) AS balance"),
        F.expr("max(IF(is_content, ordinal, NULL)) AS content_ordinal"),
    )
    outcome = (
        "CASE WHEN ends_with_content OR balance > 0 THEN 'row' "
        "WHEN balance = 0 THEN 'as before' ELSE 'no row' END AS outcome"
    )
    decided = (
        transactions.selectExpr(*keys, "commit_lsn", outcome, "content_ordinal")
        .groupBy(*keys)
        .agg(
            F.expr("max(struct(commit_lsn, outcome, content_ordinal)) AS last"),
            F.expr("max(IF(outcome <> 'as before', struct(commit_lsn, outcome), NULL)) AS certain"),
        )
        .selectExpr(
            *(f"{key} AS d_{key}" for key in keys),
            "last.commit_lsn AS d_lsn",
            "last.content_ordinal AS d_ordinal",
            "IF(last.outcome = 'as before', coalesce(certain.outcome, last.outcome), last.outcome) "
            "AS d_outcome",
        )
    )
    same_key = " AND ".join(f"{key} <=> d_{key}" for key in keys)
    joined = decided.alias("d").join(
        events.where("is_content").alias("e"),
        on=F.expr(f"{same_key} AND commit_lsn = d_lsn AND ordinal = d_ordinal"),
        how="left",
    )
    gone = "(d_outcome = 'no row')"
    columns = [
        *(f"d_{key} AS {key}" for key in keys),
        "d_lsn AS commit_lsn",
        "coalesce(d_ordinal, 0) AS ordinal",
        "commit_ts",
        f"NOT {gone} AS is_content",
        "d_outcome = 'as before' AS needs_presence",
    ]
    done = {*keys, "commit_lsn", "ordinal", "commit_ts", "is_content"}
    columns += [
        f"IF({gone}, NULL, {name}) AS {name}" for name in events.columns if name not in done
    ]
    return joined.selectExpr(*columns)
