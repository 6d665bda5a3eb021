"""The last known value of a field that a change leaves out as unchanged TOAST.

An update sends `unchanged` instead of an out-of-line value that it did not change. NULL would be
wrong, and so would the value of another row that had the key before. A *stay* is the time that one
row has one key: it begins with an insert, with a key change to this key, or before the range.
Within a stay, the value is the last one that a change contains. If the key is a part of the replica
identity, two rows may have it within a transaction (`latest.py`), so a stay is the time that one
row has one identity, and a change of the identity counts as a key change.

If no change of the stay contains the value, a change of an earlier stay of the same row may. Stays
and key changes form chains: a key change begins a stay, and the departure at its position ends the
previous stay. Chains are found by doubling: after n joins, every key change knows the key change
2^n steps before it, or the first one of its chain. One window over each chain then finds the last
value. If the row existed before the range, the table has the value: the MERGE itself takes it from
the row with the same key, and a row with another key (`origin_0` ...) is fetched first.

An insert may leave a value out, too: an update that moves a row into the row filter of the
publication is sent as an insert. The value may have changed outside the filter, so neither an
earlier row with the key nor the table has it, and the merge asks for a snapshot.

REPLICA IDENTITY FULL never comes here: its old tuple has the value (`events.Fold.new_text`).
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.spark.computed_rows import compute_rows
from pgcdc_assets.spark.sql import identifier, string

UNKNOWN_VALUE = "pgcdc: an unchanged TOAST value is nowhere to be found"

_PAST = "ORDER BY commit_lsn, ordinal, is_content ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
_HERE = "struct(commit_lsn AS lsn, ordinal AS ordinal)"
# The departure of a key change.
_HAS_LEFT = "(op = 'U' AND NOT is_content)"
_BEGAN = "struct(stay.lsn AS lsn, stay.ordinal AS ordinal)"
_IS_MOVED = "coalesce(stay.is_move, false)"


def with_known_values(events: DataFrame, fold: Fold) -> DataFrame:
    """Add the last value within the same stay of each field that a change leaves out.

    Adds `stay` (where it began, and whether by a key change; NULL if before the range) and
    `known_3` ... (a struct with the text; NULL if unknown), and keeps in `unknown` only what stays
    unknown.
    """
    keys = ", ".join(fold.row_columns)
    start = "struct(commit_lsn AS lsn, ordinal AS ordinal, is_move)"
    stay = f"IF(is_arrival, {start}, NULL)"
    stays = events.selectExpr("*", f"last({stay}, true) OVER (PARTITION BY {keys} {_PAST}) AS stay")
    values = []
    for i in fold.unknown:
        said = f"is_content AND NOT coalesce(array_contains(unknown, {i}), false)"
        values.append(
            f"last(IF({said}, struct(tuple[{i}] AS text), NULL), true) "
            f"OVER (PARTITION BY {keys}, stay.lsn, stay.ordinal {_PAST}) AS known_{i}"
        )
    names = [name for name in events.columns if name != "unknown"]
    return stays.selectExpr(*names, "stay", "unknown", *values).selectExpr(
        *names, "stay", *_values(fold), f"{_still_unknown(fold)} AS unknown"
    )


def follow_key_changes(latest: DataFrame, known: DataFrame, fold: Fold) -> DataFrame:
    """Fill unknown fields of rows that came from another key, and add the origin's key, `origin_0`
    ...

    A field that nothing has raises `UNKNOWN_VALUE` during execution.

    Args:
        latest: the events to complete, one or several of a key.
        known: all events, from `with_known_values`.
    """
    rows = _follow_key_changes(latest, known, fold)
    names = [name for name in rows.columns if name != "unknown"]
    # The row came in this range, and no change since contains the value.
    is_lost = "unknown IS NOT NULL AND stay IS NOT NULL AND NOT is_elsewhere"
    return rows.selectExpr(*names, f"IF({is_lost}, {_error('ARRAY<INT>')}, unknown) AS unknown")


def _follow_key_changes(latest: DataFrame, known: DataFrame, fold: Fold) -> DataFrame:
    keys, origin = fold.key_columns, fold.named("origin", "origin_rescued")
    nothing = [f"CAST(NULL AS {latest.schema[k].dataType.simpleString()})" for k in keys]
    empty = [f"{null} AS {o}" for null, o in zip(nothing, origin, strict=True)]
    empty.append("false AS is_elsewhere")
    if not fold.stats.has_old_tuples:
        return latest.selectExpr("*", *empty)
    travels = f"(unknown IS NOT NULL AND {_IS_MOVED})"
    settled = latest.where(f"NOT {travels}").selectExpr("*", *empty)
    names = latest.columns
    moving = latest.where(travels).selectExpr("*", f"{_BEGAN} AS at", "false AS has_left")
    left = known.where(_HAS_LEFT).selectExpr(*names, f"{_HERE} AS at", "true AS has_left")
    chains = moving.unionByName(left).join(_find_chains(known), on="at")
    past = f"OVER (PARTITION BY chain {_PAST})"
    # Only the row of a chain's first key change can have existed before the range.
    before = f"IF(has_left AND stay IS NULL, struct({', '.join(keys)}), NULL)"
    filled = (
        chains.selectExpr(
            *(name for name in names if name not in _values(fold)),
            "has_left",
            *(f"last(known_{i}, true) {past} AS known_{i}" for i in fold.unknown),
            f"last({before}, true) {past} AS before",
        )
        .where("NOT has_left")
        .selectExpr(
            *(name for name in names if name != "unknown"),
            f"{_still_unknown(fold)} AS unknown",
            "before",
        )
    )
    is_elsewhere = "(unknown IS NOT NULL AND before IS NOT NULL)"
    return settled.unionByName(
        filled.selectExpr(
            *names,
            *(
                f"IF({is_elsewhere}, before.{key}, NULL) AS {o}"
                for key, o in zip(keys, origin, strict=True)
            ),
            f"{is_elsewhere} AS is_elsewhere",
        )
    )


def _find_chains(known: DataFrame) -> DataFrame:
    """Find the first key change of the chain (`chain`) of each key change (`at`)."""
    reached = known.where(_HAS_LEFT).selectExpr(
        f"{_HERE} AS at",
        f"IF({_IS_MOVED}, {_BEGAN}, {_HERE}) AS chain",
        f"NOT {_IS_MOVED} AS is_first",
    )
    reached = compute_rows(reached)
    while not reached.where("NOT is_first").isEmpty():
        further = reached.selectExpr(
            "at AS chain", "chain AS next_chain", "is_first AS next_is_first"
        )
        joined = reached.join(further, on="chain")
        reached = compute_rows(
            joined.selectExpr("at", "next_chain AS chain", "next_is_first AS is_first")
        )
    return reached.select("at", "chain")


def _values(fold: Fold) -> list[str]:
    return [f"known_{i}" for i in fold.unknown]


def _still_unknown(fold: Fold) -> str:
    left = ", ".join(
        f"IF(array_contains(unknown, {i}) AND known_{i} IS NULL, {i}, NULL)" for i in fold.unknown
    )
    return f"nullif(array_compact(array({left})), CAST(array() AS ARRAY<INT>))"


def fetch_unknown(rows: DataFrame, fold: Fold, stored: DataFrame, position: str) -> DataFrame:
    """Fill unknown fields from the table's row with the key of the origin, `origin_0` ...

    Rows with `is_elsewhere` are filled; other rows keep their `unknown`.

    Args:
        stored: the rows of the table before the range.
        position: a column of these rows that is never NULL.
    """
    schema = fold.schema
    met = fold.same_key("origin", "origin_rescued")
    joined = rows.alias("s").join(
        stored.alias("t"), on=F.expr(f"s.is_elsewhere AND {met}"), how="left"
    )
    kept = [
        name
        for name in rows.columns
        if name not in {"unknown", "rescued", *(f"value_{i}" for i in fold.unknown)}
    ]
    columns = [f"s.{name} AS {name}" for name in kept]
    for i in fold.unknown:
        mine, theirs = f"s.value_{i}", f"t.{identifier(schema.fields[i].name)}"
        taken = f"s.is_elsewhere AND array_contains(s.unknown, {i})"
        missing = f"t.{identifier(position)} IS NULL"
        found = f"IF({missing}, {_error(schema.fields[i].type.ddl)}, {theirs})"
        columns.append(f"IF({taken}, {found}, {mine}) AS value_{i}")
    columns.append(f"IF(s.is_elsewhere, {joined_rescued_sql(fold)}, s.rescued) AS rescued")
    columns.append("IF(s.is_elsewhere, NULL, s.unknown) AS unknown")
    return joined.selectExpr(*columns)


def value_or_error_sql(fold: Fold, index: int, prefix: str) -> str:
    """Write the SQL of a field's value, with an error if it is unknown and no row has it."""
    if index not in fold.unknown:
        return f"{prefix}value_{index}"
    unknown = f"coalesce(array_contains({prefix}unknown, {index}), false)"
    return f"IF({unknown}, {_error(fold.schema.fields[index].type.ddl)}, {prefix}value_{index})"


def joined_rescued_sql(fold: Fold) -> str:
    """Write the SQL of `_rescued` for a row with fields from the row of the table."""
    names = [
        f"IF(array_contains(s.unknown, {i}), {string(fold.schema.fields[i].name)}, NULL)"
        for i in fold.unknown
    ]
    empty = "CAST(map() AS MAP<STRING, STRING>)"
    taken = (
        f"map_filter(coalesce(t._rescued, {empty}), (name, _text) -> "
        f"array_contains(array_compact(array({', '.join(names)})), name))"
    )
    both = f"map_concat(coalesce(s.rescued, {empty}), {taken})"
    return f"IF(size({both}) = 0, NULL, {both})"


def _error(ddl: str) -> str:
    return f"CAST(raise_error({string(UNKNOWN_VALUE)}) AS {ddl})"
