"""The last known value of what a change leaves out as unchanged TOAST.

An update sends `unchanged` instead of a value that is stored out of line and was not touched; NULL
would be wrong, and so would any value that another row had under this key. A *stay* is the time
that one row spends at one key: it begins with an insert, with a key change that brings the row
here, or before the range. Within a stay the value is the last one that was said. If the stay says
nothing, the row is followed to the key it came from, as it stood just before it left, and so on:
one join per step, and only for the rows concerned. If the row was there before the range, the table
has the value: under the row's own key the MERGE itself takes it, and under another key (`o0` ...)
the row is fetched first.

REPLICA IDENTITY FULL never comes here: its old tuple has the value (`events.Fold.new_text`).
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.merge.events import Fold

_PAST = "ORDER BY commit_lsn, ordinal, is_content ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"


def with_known_values(events: DataFrame, fold: Fold) -> DataFrame:
    """Add, per field that is ever left out, the last value said in the same stay.

    Adds `stay` (where it began, and the key before; NULL if before the range) and `v3` ... (a
    struct with the text; NULL if unknown), and keeps in `unknown` only what stays unknown.
    """
    keys = ", ".join(fold.key_columns)
    previous = ", ".join(fold.previous_columns)
    start = f"struct(commit_lsn AS lsn, ordinal AS ordinal, is_move, {previous})"
    stay = f"IF(is_arrival, {start}, NULL)"
    stays = events.selectExpr("*", f"last({stay}, true) OVER (PARTITION BY {keys} {_PAST}) AS stay")
    values = []
    for i in fold.unknown:
        said = f"is_content AND NOT coalesce(array_contains(unknown, {i}), false)"
        values.append(
            f"last(IF({said}, struct(tuple[{i}] AS text), NULL), true) "
            f"OVER (PARTITION BY {keys}, stay.lsn, stay.ordinal {_PAST}) AS v{i}"
        )
    names = [name for name in events.columns if name != "unknown"]
    return stays.selectExpr(*names, "stay", "unknown", *values).selectExpr(
        *names, "stay", *_values(fold), f"{_still_unknown(fold)} AS unknown"
    )


def follow_key_changes(winners: DataFrame, known: DataFrame, fold: Fold) -> DataFrame:
    """Fill unknown fields of rows that came from another key; add the key to fetch from, `o0` ...

    Args:
        winners: the events wanted, one or several of a key.
        known: all events as `with_known_values` gave them.
    """
    keys = fold.key_columns
    origin, wanted = fold.named("o", "u"), fold.named("w", "x")
    previous = fold.previous_columns
    nothing = [f"CAST(NULL AS {winners.schema[k].dataType.simpleString()})" for k in keys]
    empty = [f"{null} AS {o}" for null, o in zip(nothing, origin, strict=True)]
    empty.append("false AS is_elsewhere")
    if not fold.facts.has_old_tuples:
        return winners.selectExpr("*", *empty)
    travels = "(unknown IS NOT NULL AND coalesce(stay.is_move, false))"
    settled = winners.where(f"NOT {travels}").selectExpr("*", *empty)
    columns = settled.columns
    moving = winners.where(travels).selectExpr(
        "*",
        *empty,
        *(f"stay.{p} AS {w}" for p, w in zip(previous, wanted, strict=True)),
        "stay.lsn AS before_lsn",
        "stay.ordinal AS before_ordinal",
    )
    moving = moving.localCheckpoint()
    steps = known.where("is_content").selectExpr(
        *(f"{k} AS h_{k}" for k in keys),
        "commit_lsn AS h_lsn",
        "ordinal AS h_ordinal",
        "stay AS h_stay",
        *(f"v{i} AS h_v{i}" for i in fold.unknown),
    )
    while not moving.isEmpty():
        moving = _step(moving, steps, fold, columns).localCheckpoint()
        settled = settled.unionByName(moving.where("before_lsn IS NULL").select(*columns))
        moving = moving.where("before_lsn IS NOT NULL")
    return settled


def _step(moving: DataFrame, steps: DataFrame, fold: Fold, columns: list[str]) -> DataFrame:
    """Follow each row to the key it came from, as it stood just before it left."""
    keys, previous = fold.key_columns, fold.previous_columns
    origin, wanted = fold.named("o", "u"), fold.named("w", "x")
    met = " AND ".join(f"{w} <=> h_{k}" for w, k in zip(wanted, keys, strict=True))
    earlier = "struct(h_lsn, h_ordinal) < struct(before_lsn, before_ordinal)"
    joined = moving.join(steps, on=F.expr(f"{met} AND {earlier}"), how="left")
    age = (
        f"row_number() OVER (PARTITION BY {', '.join(keys)}, commit_lsn, ordinal "
        "ORDER BY h_lsn DESC NULLS LAST, h_ordinal DESC)"
    )
    found = joined.selectExpr("*", f"{age} AS age").where("age = 1")
    rest = [
        name for name in columns if name not in {"unknown", "is_elsewhere", *origin, *_values(fold)}
    ]
    filled = found.selectExpr(
        *rest,
        *wanted,
        "h_lsn",
        "h_stay",
        *(f"coalesce(v{i}, h_v{i}) AS v{i}" for i in fold.unknown),
        "unknown",
    ).selectExpr(
        *rest,
        *wanted,
        "h_lsn",
        "h_stay",
        *_values(fold),
        f"{_still_unknown(fold)} AS unknown",
    )
    from_table = "(unknown IS NOT NULL AND (h_lsn IS NULL OR h_stay IS NULL))"
    goes_on = "(unknown IS NOT NULL AND coalesce(h_stay.is_move, false))"
    names = [*columns, *wanted, "before_lsn", "before_ordinal"]
    return filled.selectExpr(
        *rest,
        "unknown",
        *_values(fold),
        *(f"IF({from_table}, {w}, NULL) AS {o}" for w, o in zip(wanted, origin, strict=True)),
        *(f"IF({goes_on}, h_stay.{p}, NULL) AS {w}" for p, w in zip(previous, wanted, strict=True)),
        f"{from_table} AS is_elsewhere",
        f"IF({goes_on}, h_stay.lsn, NULL) AS before_lsn",
        f"IF({goes_on}, h_stay.ordinal, NULL) AS before_ordinal",
    ).select(*names)


def _values(fold: Fold) -> list[str]:
    return [f"v{i}" for i in fold.unknown]


def _still_unknown(fold: Fold) -> str:
    left = ", ".join(
        f"IF(array_contains(unknown, {i}) AND v{i} IS NULL, {i}, NULL)" for i in fold.unknown
    )
    return f"nullif(array_compact(array({left})), CAST(array() AS ARRAY<INT>))"
