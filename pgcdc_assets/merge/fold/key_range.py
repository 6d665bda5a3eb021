"""The range of the changed keys, so that Delta skips the files without such keys.

A MERGE joins on equal keys, and Delta skips no file because of the join. If changes are local, such
as changes of recent orders, two literals in the ON clause exclude most of a large table. Ranges are
used for whole numbers only: their changes are often local, and the literals in the table's history
reveal no more than the statistics of its files.
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


def widen_range(least: int, most: int) -> tuple[int, int]:
    """Widen a range such that consecutive merges often have the same range.

    The literals are constants in generated Java source, and Spark compiles changed source again.
    New rows usually have the highest keys, so the upper end is widened more, by up to half of the
    range's length, and the lower end by up to an eighth. Both are multiples of powers of two, so
    they exceed no type that contains the range.
    """
    size = 1 << (most - least).bit_length()
    down, up = max(1, size // 16), max(1, size // 4)
    return least // down * down, -(-(most + 1) // up) * up - 1


@dataclass(frozen=True)
class ColumnRange:
    """A range of one key column of whole numbers, both ends included."""

    column: str
    ddl: str
    least: int
    most: int


@dataclass(frozen=True)
class KeyRange:
    """The rows of a table whose key columns are in these ranges."""

    ranges: tuple[ColumnRange, ...]

    def condition_sql(self, alias: str | None = None) -> str:
        """Write the SQL of the range, with literals of the columns' types.

        Args:
            alias: of the table; None for unqualified columns.
        """
        prefix = "" if alias is None else f"{alias}."
        return " AND ".join(
            between_sql(f"{prefix}{identifier(r.column)}", r.least, r.most, r.ddl)
            for r in self.ranges
        )

    def estimate_rows(self, files: pa.Table) -> float | None:
        """Estimate how many rows of some files are in the range; None without statistics.

        The estimate assumes that keys are uniformly distributed within a file.

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
    return same_key if key_range is None else f"{key_range.condition_sql('t')} AND {same_key}"


def find_key_range(rows: DataFrame, fold: Fold) -> KeyRange | None:
    """Find the range of the table that contains the keys of some rows.

    Return None if no field of the key is a whole number.

    Args:
        rows: with columns `key_0` ...; they are read once.
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
        ranges.append(ColumnRange(field.name, field.type.ddl, *widen_range(least, most)))
    return KeyRange(tuple(ranges))
