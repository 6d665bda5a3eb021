"""Between which keys the changes of a merge lie, so that Delta leaves out files without them.

A MERGE joins on equal keys, and from that alone Delta skips no file. Where changes are local, as
those of recent orders are, two literals beside the join spare most of a large table. Only whole
numbers are asked for: they are what is local, and their text in the table's history says no more
than the statistics of its files do.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

from pgcdc_assets.merge.events import Fold
from pgcdc_assets.merge.sql import identifier

_WHOLE_NUMBERS = frozenset({"SMALLINT", "INT", "BIGINT"})

# A table up to this size is read as fast as its bounds are found.
SMALL_TABLE_BYTES = 32 * 1024 * 1024


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
        if fold.shape.fields[index].type.ddl in _WHOLE_NUMBERS
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
        limits = f"CAST({least} AS {field.type.ddl}) AND CAST({most} AS {field.type.ddl})"
        parts.append(f"t.{identifier(field.name)} BETWEEN {limits}")
    return " AND ".join(parts)
