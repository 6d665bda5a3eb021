"""Conversion of a column's values between any two types."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge.column_changes import retyped_sql
from pgcdc_assets.merge.fold.table_schema import Field
from pgcdc_assets.merge.fold.types import delta_type
from pgcdc_assets.protocol.relation import Column

pytestmark = pytest.mark.spark

# SQL of a value of each Spark type that a column of the source may have.
VALUES = {
    "smallint": "5S",
    "int": "5",
    "bigint": "5L",
    "float": "5.0F",
    "double": "5.0D",
    "decimal(8,2)": "5.25BD",
    "boolean": "true",
    "date": "DATE '2024-01-02'",
    "timestamp": "TIMESTAMP '2024-01-02 03:04:05+00'",
    "timestamp_ntz": "TIMESTAMP_NTZ '2024-01-02 03:04:05'",
    "binary": "X'01ff'",
    "string": "'5'",
}
# A typmod of numeric is (precision << 16 | scale) + 4.
COLUMNS = [
    *(Column("v", 1, base_type=name) for name in ("int2", "int4", "int8", "float4", "float8")),
    *(Column("v", 1, base_type=name) for name in ("bool", "date", "timestamp", "timestamptz")),
    *(Column("v", 1, base_type=name) for name in ("bytea", "text", "uuid", "interval")),
    Column("v", 1, base_type="numeric", base_typmod=(8 << 16 | 1) + 4),
]
KEPT = {
    ("int", "BIGINT"): 5,
    ("bigint", "SMALLINT"): 5,
    ("string", "INT"): 5,
    ("smallint", "DECIMAL(8,1)"): "5.0",
    ("int", "DECIMAL(8,1)"): "5.0",
    ("bigint", "DECIMAL(8,1)"): "5.0",
    ("int", "DOUBLE"): 5.0,
    ("bigint", "FLOAT"): 5.0,
    ("date", "DATE"): "2024-01-02",
    # A value that the new type cannot hold exactly is NULL and rescued.
    ("decimal(8,2)", "DECIMAL(8,1)"): None,
    ("date", "INT"): None,
    ("int", "DATE"): None,
    ("timestamp_ntz", "DATE"): None,
}


def test_spark_converts_a_value_between_any_two_types(spark: SparkSession) -> None:
    """F5: columns without known attnums are matched by name, with any types."""
    rescued = "CAST(NULL AS MAP<STRING, STRING>) AS _rescued"
    found: dict[tuple[str, str], object] = {}
    for before, value in VALUES.items():
        fields = {delta_type(c).ddl: Field("v", delta_type(c), "") for c in COLUMNS}
        expressions = [f"{retyped_sql(field, before)} AS `{ddl}`" for ddl, field in fields.items()]
        (row,) = spark.sql(f"SELECT {value} AS v, {rescued}").selectExpr(*expressions).collect()
        found |= {(before, ddl): row[ddl] for ddl in fields}
    assert len(found) >= len(VALUES) * 9
    for pair, expected in KEPT.items():
        text = None if found[pair] is None else str(found[pair])
        assert text == (None if expected is None else str(expected)), pair


def test_an_integer_that_the_new_type_cannot_hold_exactly_is_not_converted(
    spark: SparkSession,
) -> None:
    rescued = "CAST(NULL AS MAP<STRING, STRING>) AS _rescued"
    narrow = Column("v", 1, base_type="numeric", base_typmod=(3 << 16 | 1) + 4)
    for kind, value in ((narrow, "100"), (Column("v", 1, base_type="float4"), "16777217")):
        expression = retyped_sql(Field("v", delta_type(kind), ""), "int")
        assert spark.sql(f"SELECT {value} AS v, {rescued}").selectExpr(expression).first() == (
            None,
        )
