"""Identifiers and literals: Spark reads exactly the text that was written."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.spark.sql import identifier, string

pytestmark = pytest.mark.spark

TEXTS = [
    "${env:HOME}",
    "${spark.app.name}",
    "${system:user.dir}",
    'it\'s `a` "b"',
    "\\",
    "\\'",
    "\\u0041\\n",
    "line\nend\t\r",
    ":name ? /* x */ -- y",
    "{}%s%",
    "é😀\u200b\x01",
]


def test_variables_and_escapes_do_not_change_a_text_in_sql(spark: SparkSession) -> None:
    """A default of a column, a key of `_rescued` and a path are literals of SQL text."""
    columns = ", ".join(f"{string(text)} AS {identifier(text)}" for text in TEXTS)
    [row] = spark.sql(f"SELECT {columns}").collect()
    assert row.asDict() == {text: text for text in TEXTS}
    frame = spark.range(1).selectExpr(*(f"{string(t)} AS {identifier(t)}" for t in TEXTS))
    assert frame.first().asDict() == {text: text for text in TEXTS}  # type: ignore[union-attr]
