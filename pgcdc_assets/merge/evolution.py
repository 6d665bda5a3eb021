"""Columns that were added at the source are added to the table before the merge that needs them.

Other changes of the columns have no replay yet and are refused when the shape is built
(`shape.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import SparkSession

from pgcdc_assets.merge.shape import TableShape
from pgcdc_assets.merge.sql import delta_table, identifier, string
from pgcdc_assets.merge.writing import table_properties


def add_columns(spark: SparkSession, path: str, existing: Sequence[str], shape: TableShape) -> None:
    """Add the fields that the table lacks; each step can be repeated after a crash between them."""
    missing = [i for i, field in enumerate(shape.fields) if field.name not in existing]
    if not missing:
        return
    table = delta_table(path)
    _set(spark, path, table_properties(shape))
    for i in missing:
        field = shape.fields[i]
        place = f"AFTER {identifier(shape.fields[i - 1].name)}" if i else "FIRST"
        spark.sql(
            f"ALTER TABLE {table} ADD COLUMNS ({identifier(field.name)} {field.type.ddl} "
            f"COMMENT {string(field.comment)} {place})"
        )


def set_properties(
    spark: SparkSession, path: str, existing: Mapping[str, str], shape: TableShape
) -> None:
    """Note which relation the table follows from now on."""
    properties = table_properties(shape)
    if any(existing.get(name) != value for name, value in properties.items()):
        _set(spark, path, properties)


def _set(spark: SparkSession, path: str, properties: dict[str, str]) -> None:
    spark.sql(f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES ({_assignments(properties)})")


def _assignments(properties: dict[str, str]) -> str:
    return ", ".join(f"{string(name)} = {string(value)}" for name, value in properties.items())
