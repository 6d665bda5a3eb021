"""Between which keys the changes of a merge lie, so that Delta leaves out files without them.

A MERGE joins on equal keys, and from that alone Delta skips no file. Where changes are local, as
those of recent orders are, two literals beside the join spare most of a large table. Only whole
numbers are asked for: they are what is local, and their text in the table's history says no more
than the statistics of its files do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.spark.sql import WHOLE_NUMBER_BITS, between_sql, identifier

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pgcdc_assets.merge.fold.events import Fold


def widen_range(least: int, most: int, ddl: str) -> tuple[int, int]:
    """Widen a range such that the ranges of merges that follow each other are often the same.

    They are constants in Java source, and Spark compiles other source anew and runs it cold. New
    rows most often have keys above all others, so the upper end moves and may be taken farther: it
    grows by up to half of the range's length, the lower end by up to an eighth.
    """
    limit = 1 << (WHOLE_NUMBER_BITS[ddl] - 1)
    size = 1 << (most - least).bit_length()
    down, up = max(1, size // 16), max(1, size // 4)
    return max(-limit, least // down * down), min(limit, -(-(most + 1) // up) * up) - 1


@dataclass(frozen=True)
class ColumnRange:
    """A range of one key column of whole numbers, both ends included."""

    column: str
    ddl: str
    least: int
    most: int


@dataclass(frozen=True)
class KeyRange:
    """A part of a table: the rows whose key columns lie in these ranges."""

    ranges: tuple[ColumnRange, ...]

    def condition(self, alias: str | None = None) -> str:
        """Write the SQL of it, with literals of the columns' own types.

        Args:
            alias: of the table; None for bare columns.
        """
        prefix = "" if alias is None else f"{alias}."
        return " AND ".join(
            between_sql(f"{prefix}{identifier(r.column)}", r.least, r.most, r.ddl)
            for r in self.ranges
        )

    def estimate_rows(self, files: pa.Table) -> float | None:
        """Estimate how many rows of some files lie in it; None where their statistics do not say.

        Keys are taken to lie evenly between a file's least and greatest.

        Args:
            files: as delta-rs lists them, flattened.
        """
        counts = files.column("num_records")
        if counts.null_count:
            return None
        rows = counts.to_numpy().astype(float)
        for r in self.ranges:
            if f"min.{r.column}" not in files.column_names:
                return None
            least = pc.fill_null(files.column(f"min.{r.column}"), r.least).to_numpy().astype(float)
            most = pc.fill_null(files.column(f"max.{r.column}"), r.most).to_numpy().astype(float)
            common = np.minimum(most, r.most) - np.maximum(least, r.least) + 1
            rows *= np.clip(common / (most - least + 1), 0, 1)
        return float(rows.sum())


def match_sql(fold: Fold, key_range: KeyRange | None) -> str:
    """Write the SQL of a MERGE's ON: rows `s` and `t` have one key, and `t` is in the range."""
    same_key = fold.same_key("key", "key_rescued")
    return same_key if key_range is None else f"{key_range.condition('t')} AND {same_key}"


def find_key_range(rows: DataFrame, fold: Fold) -> KeyRange | None:
    """Find the range of the table that holds the keys of some rows.

    None where no field of the key has a range.

    Args:
        rows: with `key_0` ...; they are read once.
    """
    indexes = {
        number: fold.schema.fields[index]
        for number, index in enumerate(fold.schema.key)
        if fold.schema.fields[index].type.ddl in WHOLE_NUMBER_BITS
    }
    if not indexes:
        return None
    row = rows.selectExpr(
        *(f"min(key_{number}) AS least_{number}" for number in indexes),
        *(f"max(key_{number}) AS most_{number}" for number in indexes),
    ).collect()[0]
    ranges = []
    for number, field in indexes.items():
        least, most = row[f"least_{number}"], row[f"most_{number}"]
        if least is None:
            return None
        ddl = field.type.ddl
        ranges.append(ColumnRange(field.name, ddl, *widen_range(least, most, ddl)))
    return KeyRange(tuple(ranges))
