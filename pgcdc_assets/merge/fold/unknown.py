"""Values that no change of the range says, taken from the row that the table had before it."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.spark.sql import identifier, string

UNKNOWN_VALUE = "pgcdc: an unchanged TOAST value is nowhere to be found"


def fetch_unknown(rows: DataFrame, fold: Fold, stored: DataFrame, position: str) -> DataFrame:
    """Fill what is unknown from the table's row under the key that each row names, `o0` ...

    Rows with `is_elsewhere` are filled; the others keep their `unknown`.

    Args:
        stored: the table's rows as they were before the range.
        position: a column of theirs that is never NULL.
    """
    shape = fold.shape
    met = fold.same_key("o", "u")
    joined = rows.alias("s").join(
        stored.alias("t"), on=F.expr(f"is_elsewhere AND {met}"), how="left"
    )
    kept = [
        name
        for name in rows.columns
        if name not in {"unknown", "rescued", *(f"c{i}" for i in fold.unknown)}
    ]
    columns = [f"s.{name} AS {name}" for name in kept]
    for i in fold.unknown:
        mine, theirs = f"s.c{i}", f"t.{identifier(shape.fields[i].name)}"
        taken = f"s.is_elsewhere AND array_contains(s.unknown, {i})"
        missing = f"t.{identifier(position)} IS NULL"
        found = f"IF({missing}, {_error(shape.fields[i].type.ddl)}, {theirs})"
        columns.append(f"IF({taken}, {found}, {mine}) AS c{i}")
    columns.append(f"IF(s.is_elsewhere, {joined_rescued(fold)}, s.rescued) AS rescued")
    columns.append("IF(s.is_elsewhere, NULL, s.unknown) AS unknown")
    return joined.selectExpr(*columns)


def value_or_error(fold: Fold, index: int, prefix: str) -> str:
    """Write the SQL of a field's value where there is no row to take an unknown one from."""
    if index not in fold.unknown:
        return f"{prefix}c{index}"
    unknown = f"coalesce(array_contains({prefix}unknown, {index}), false)"
    return f"IF({unknown}, {_error(fold.shape.fields[index].type.ddl)}, {prefix}c{index})"


def joined_rescued(fold: Fold) -> str:
    """Write the SQL of `_rescued` for a row that takes its unknown fields from the table's row."""
    names = [
        f"IF(array_contains(s.unknown, {i}), {string(fold.shape.fields[i].name)}, NULL)"
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
