"""The event of a key that determines the key's row after the range.

Under the identities DEFAULT and USING INDEX it is the newest event, if the key is the replica
identity: its index is never deferrable, so at most one row has a key at any time.

If the key is a part of the replica identity, it may be unique at the commit only, by a deferrable
constraint of its own. With the key (id) and the identity (id, part), a transaction may insert the
row (1, 2) and then delete the row (1, 1): the newest event of the key 1 is a departure although the
row (1, 2) remains. The identity tells which row an event is about, so each transaction is reduced
to one event of a key. If the last event of an identity is a content, its row is the row of the key
at the commit. If there is no such row, and a row left that was there before the transaction, the
key has lost its row. Otherwise the transaction does not change the row of the key. Between two
transactions a key has one row, whatever its identity, so the newest of these events counts.

Under REPLICA IDENTITY FULL the key may belong to a deferrable constraint, and within a transaction
two rows may have one key: a swap of the keys 1 and 2 sends `1 -> 2`, then `2 -> 1`, and the newest
event of key 2 is a departure although a row with key 2 remains. But every change brings its whole
old row, so rows can be counted as in a multiset: a change removes the old row from its key and adds
the new row. A row that was added last, or more often than removed, is the row of its key after the
range. If there is no such row, and a row was removed more often than added, the row existed before
the range and the key has lost it. Otherwise the key is unchanged.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.merge.fold.events import Fold


def keep_newest_per_key(events: DataFrame, fold: Fold) -> DataFrame:
    """Keep the newest event of each key.

    If a departure and a content of one key have the same position (two texts of one value, such as
    0 and -0 of a float), the content is kept.
    """
    keys = ", ".join(fold.key_columns)
    if fold.further_identity:
        events = keep_rows_at_commit(events, fold)
    age = (
        f"row_number() OVER (PARTITION BY {keys} "
        "ORDER BY commit_lsn DESC, ordinal DESC, is_content DESC)"
    )
    return events.selectExpr("*", f"{age} AS age").where("age = 1").drop("age")


def keep_rows_at_commit(events: DataFrame, fold: Fold, *further: str) -> DataFrame:
    """Keep for each key and transaction the row of the key at the commit, or its departure.

    Args:
        events: from `build_events`, if the key is a part of the replica identity.
        further: columns that form a group together with the key and the transaction.
    """
    group = ("commit_lsn", *further)
    of_row = f"OVER (PARTITION BY {', '.join((*fold.row_columns, *group))}"
    of_key = f"OVER (PARTITION BY {', '.join((*fold.key_columns, *group))}"
    rows = events.selectExpr(
        "*",
        f"row_number() {of_row} ORDER BY ordinal DESC, is_content DESC) AS age",
        f"sum(IF(is_content, CAST(is_arrival AS INT), -1)) {of_row}) AS balance",
    ).where("age = 1 AND (is_content OR balance < 0)")
    place = f"row_number() {of_key} ORDER BY is_content DESC, ordinal DESC) AS place"
    return rows.selectExpr("*", place).where("place = 1").drop("age", "balance", "place")


def keep_bag_remainder(bag: DataFrame, fold: Fold, *further: str) -> DataFrame:
    """Keep for each key the row after the range, or its departure.

    Args:
        further: columns that form a group together with the key; they are kept.
    """
    keys = [*fold.key_columns, *further]
    rest = ["commit_ts", "op", *fold.origin_columns]
    at = ", ".join(("commit_lsn", "ordinal", *rest))
    aggregates = [
        F.expr("sum(IF(is_content, 1, -1)) AS balance"),
        F.expr(f"max(struct(commit_lsn, ordinal, is_content, {', '.join(rest)})) AS last"),
        F.expr(f"max(struct({at})) FILTER (WHERE is_content) AS last_put_in"),
    ]
    compared = [fold.compared_text(i) for i in fold.common_fields]
    if compared == [f"tuple[{i}]" for i in range(len(fold.schema.fields))]:
        rows = bag.groupBy(*keys, "tuple").agg(*aggregates)
    else:
        # A row that was added before a column existed is removed with the column's default.
        common = f"array({', '.join(compared)})"
        newest = "max_by(tuple, struct(commit_lsn, ordinal)) FILTER (WHERE is_content) AS tuple"
        rows = (
            bag.selectExpr("*", f"{common} AS identified_by")
            .groupBy(*keys, "identified_by")
            .agg(*aggregates, F.expr(newest))
        )
    newest_at = ", ".join(f"last.{name}" for name in ("commit_lsn", "ordinal", *rest))
    is_held = "(last.is_content OR balance > 0)"
    decided = rows.groupBy(*keys).agg(
        F.expr(f"max(struct(last_put_in AS at, tuple)) FILTER (WHERE {is_held}) AS held"),
        F.expr(f"max(struct({newest_at})) AS newest"),
        F.expr("bool_or(balance < 0) AS has_lost"),
    )
    return decided.where("held IS NOT NULL OR has_lost").selectExpr(
        *keys,
        "coalesce(held.at, newest).commit_lsn AS commit_lsn",
        "coalesce(held.at, newest).ordinal AS ordinal",
        *(f"coalesce(held.at, newest).{name} AS {name}" for name in rest),
        "held IS NOT NULL AS is_content",
        "held.tuple AS tuple",
    )
