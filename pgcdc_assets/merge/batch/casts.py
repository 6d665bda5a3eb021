"""Texts of many tables as typed values, by one Spark projection.

The texts of all columns of one Delta type, of whatever table, are one column of the projection.
Spark evaluates a projection of a few thousand local rows in its driver, without a job of tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from pgcdc_assets.merge.batch.column_types import arrow_type
from pgcdc_assets.merge.batch.events import one_array
from pgcdc_assets.merge.fold.table_schema import DeltaType

# The bound of the texts of one projection, with those that pad its columns. Each text of a column
# has 8 bytes, beside its characters.
MOST_TEXTS = 4_000_000


@dataclass
class Casts:
    """Texts to be cast. `add` all, `run` once, then take the values by their numbers."""

    _wanted: list[tuple[DeltaType, pa.Array]] = field(default_factory=list)
    _values: list[pa.Array] = field(default_factory=list)

    @property
    def row_count(self) -> int:
        """The number of texts."""
        return sum(len(texts) for _, texts in self._wanted)

    @property
    def needs_spark(self) -> bool:
        """Whether any text becomes a value of another type."""
        return any(_is_cast(kind, texts) for kind, texts in self._wanted)

    def add(self, kind: DeltaType, texts: pa.Array) -> int:
        """Add texts; return the number of their values."""
        self._wanted.append((kind, texts))
        return len(self._wanted) - 1

    def values(self, number: int) -> pa.Array:
        """Return typed values in the order of their texts."""
        return self._values[number]

    def run(self, spark: SparkSession) -> None:
        """Cast all texts.

        Args:
            spark: a session that no other thread uses at the same time; not used without a cast.
        """
        by_expression: dict[str, list[int]] = {}
        for number, (kind, texts) in enumerate(self._wanted):
            if _is_cast(kind, texts):
                by_expression.setdefault(kind.expression("text"), []).append(number)
        typed: dict[int, pa.Array] = {}
        for together in self._projections(by_expression):
            typed |= self._project(spark, together)
        for number, (kind, texts) in enumerate(self._wanted):
            if number in typed:
                values = typed[number]
            elif kind.is_text:
                values = texts
            else:
                values = pa.nulls(len(texts), arrow_type(kind.ddl))
            self._values.append(values.cast(arrow_type(kind.ddl)))

    def _projections(self, by_expression: dict[str, list[int]]) -> Iterator[dict[str, list[int]]]:
        """Divide the columns into projections: each column is as long as the longest of its own."""
        lengths = {
            expression: sum(len(self._wanted[number][1]) for number in numbers)
            for expression, numbers in by_expression.items()
        }
        together: dict[str, list[int]] = {}
        height = 0
        for expression in sorted(by_expression, key=lambda each: lengths[each], reverse=True):
            height = height or lengths[expression]
            if together and height * (len(together) + 1) > MOST_TEXTS:
                yield together
                together, height = {}, lengths[expression]
            together[expression] = by_expression[expression]
        if together:
            yield together

    def _project(
        self, spark: SparkSession, by_expression: dict[str, list[int]]
    ) -> dict[int, pa.Array]:
        columns = [
            pa.concat_arrays([self._wanted[number][1] for number in numbers])
            for numbers in by_expression.values()
        ]
        height = max(map(len, columns))
        texts = [
            pa.concat_arrays([column, pa.nulls(height - len(column), column.type)])
            for column in columns
        ]
        names = [f"text_{i}" for i in range(len(texts))]
        local = pa.table([np.arange(height), *texts], names=["place", *names])
        expressions = [
            f"{self._wanted[numbers[0]][0].expression(name)} AS value_{i}"
            for i, (name, numbers) in enumerate(zip(names, by_expression.values(), strict=True))
        ]
        frame = spark.createDataFrame(local).selectExpr("place", *expressions)
        values = frame.toArrow().sort_by("place")
        found = {}
        for i, numbers in enumerate(by_expression.values()):
            column, start = one_array(values.column(f"value_{i}")), 0
            for number in numbers:
                length = len(self._wanted[number][1])
                found[number] = column.slice(start, length)
                start += length
        return found


def _is_cast(kind: DeltaType, texts: pa.Array) -> bool:
    return not kind.is_text and texts.null_count < len(texts)
