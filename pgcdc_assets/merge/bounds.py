"""Between which keys the changes of a merge lie, so that Delta leaves out files without them.

A MERGE joins on equal keys, and from that alone Delta skips no file. Where changes are local, as
those of recent orders are, two literals beside the join spare most of a large table. Only whole
numbers are asked for: they are what is local, and their text in the table's history says no more
than the statistics of its files do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgcdc_assets.merge.sql import identifier

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pgcdc_assets.merge.events import Fold

# And the bits of their values.
_WHOLE_NUMBERS = {"SMALLINT": 16, "INT": 32, "BIGINT": 64}


def has_bounds(ddl: str) -> bool:
    """Say whether the range of a column of this type is asked for."""
    return ddl.upper() in _WHOLE_NUMBERS


def widened(least: int, most: int, ddl: str) -> tuple[int, int]:
    """Widen a range such that the ranges of merges that follow each other are often the same.

    They are constants in Java source, and Spark compiles other source anew and runs it cold. New
    rows most often have keys above all others, so the upper end moves and may be taken farther: it
    grows by up to half of the range's length, the lower end by up to an eighth.
    """
    limit = 1 << (_WHOLE_NUMBERS[ddl.upper()] - 1)
    size = 1 << (most - least).bit_length()
    down, up = max(1, size // 16), max(1, size // 4)
    return max(-limit, least // down * down), min(limit, -(-(most + 1) // up) * up) - 1


def between(column: str, least: object, most: object, ddl: str) -> str:
    """Write the SQL of a range, with literals of the column's own type."""
    return f"{column} BETWEEN CAST({least} AS {ddl}) AND CAST({most} AS {ddl})"


def matched(fold: Fold, bounds: str | None) -> str:
    """Write the SQL of a MERGE's ON: rows `s` and `t` have one key, and `t` lies in the bounds."""
    same_key = fold.same_key("k", "r")
    return same_key if bounds is None else f"{bounds} AND {same_key}"


def key_bounds(rows: DataFrame, fold: Fold) -> str | None:
    """Write the SQL of the range of the table `t` that holds the keys of some rows.

    None where no field of the key has a range.

    Args:
        rows: with `k0` ...; they are read once.
    """
    indexes = {
        number: fold.shape.fields[index]
        for number, index in enumerate(fold.shape.key)
        if has_bounds(fold.shape.fields[index].type.ddl)
    }
    if not indexes:
        return None
    row = rows.selectExpr(
        *(f"min(k{number}) AS least{number}" for number in indexes),
        *(f"max(k{number}) AS most{number}" for number in indexes),
    ).collect()[0]
    parts = []
    for number, field in indexes.items():
        least, most = row[f"least{number}"], row[f"most{number}"]
        if least is None:
            return None
        ddl = field.type.ddl
        parts.append(between(f"t.{identifier(field.name)}", *widened(least, most, ddl), ddl))
    return " AND ".join(parts)
