"""The current rows of an SCD table with the columns `id` and `v`."""

from __future__ import annotations

from pyspark.sql import SparkSession


def current_values(spark: SparkSession, path: str) -> list[tuple[int, str]]:
    """Return `id` and `v` of the current rows of an SCD1 or SCD2 table, in order."""
    rows = spark.read.format("delta").load(path)
    if "_is_current" in rows.columns:
        rows = rows.where("_is_current")
    return sorted((row["id"], row["v"]) for row in rows.collect())
