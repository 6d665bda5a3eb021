"""Columns that were added at the source are added to the table before the merge that needs them.

Other changes of the columns have no replay yet and are refused when the shape is built
(`shape.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import SparkSession

from pgcdc_assets.merge.scd1 import table_properties
from pgcdc_assets.merge.shape import TableShape
from pgcdc_assets.merge.sql import delta_table, identifier, string


def add_columns(spark: SparkSession, path: str, existing: Sequence[str], shape: TableShape) -> None:
    """Add the fields that the table lacks; each step can be repeated after a crash between them."""
    missing = [i for i, field in enumerate(shape.fields) if field.name not in existing]
    if not missing:
        return
    table = delta_table(path)
    properties = table_properties(shape)
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ({_assignments(properties)})")
    for i in missing:
        field = shape.fields[i]
        place = f"AFTER {identifier(shape.fields[i - 1].name)}" if i else "FIRST"
        spark.sql(
            f"ALTER TABLE {table} ADD COLUMNS ({identifier(field.name)} {field.type.ddl} "
            f"COMMENT {string(field.comment)} {place})"
        )


def _assignments(properties: dict[str, str]) -> str:
    return ", ".join(f"{string(name)} = {string(value)}" for name, value in properties.items())
