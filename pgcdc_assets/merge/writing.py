"""Writing SCD tables: each function is one Delta commit that carries the watermark.

The watermark is the commit's application transaction, so a repeat is recognised by Delta itself and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.rows import target_columns
from pgcdc_assets.merge.shape import TableShape, key_text
from pgcdc_assets.merge.sql import delta_table

KEY = "pgcdc.key"
RELATION_ID = "pgcdc.relation_id"
RELATION_VERSION = "pgcdc.relation_version"

SOURCE_VIEW = "pgcdc_source"

_NEEDS_MAPPING = frozenset(" ,;{}()\n\t=")


def table_properties(shape: TableShape) -> dict[str, str]:
    """Give the properties of a table of this shape."""
    properties = {
        # A MERGE then marks rows as deleted instead of writing their files anew.
        "delta.enableDeletionVectors": "true",
        KEY: key_text(shape.key_names),
        RELATION_ID: str(shape.relation.relation_id),
        RELATION_VERSION: str(shape.version),
    }
    if any(_NEEDS_MAPPING & set(field.name) for field in shape.fields):
        properties["delta.columnMapping.mode"] = "name"
    return properties


def create_or_replace(
    path: str,
    rows: DataFrame,
    shape: TableShape,
    app_id: str,
    watermark: Lsn,
    partitioned_by: Sequence[str] = (),
) -> None:
    """Write the numbered columns as the table's whole contents, in a table of this shape."""
    writer = (
        rows.select(*target_columns(shape))
        .writeTo(delta_table(path))
        .using("delta")
        .option("txnAppId", app_id)
        .option("txnVersion", str(int(watermark)))
    )
    if partitioned_by:
        writer = writer.partitionedBy(*map(F.col, partitioned_by))
    for name, value in table_properties(shape).items():
        writer = writer.tableProperty(name, value)
    writer.createOrReplace()


def replace_contents(
    path: str, rows: DataFrame, shape: TableShape, app_id: str, watermark: Lsn
) -> None:
    """Replace the table's rows by the numbered columns, and keep its shape."""
    overwrite(rows.select(*target_columns(shape)), path, app_id, watermark)


def overwrite(rows: DataFrame, path: str, app_id: str, watermark: Lsn) -> None:
    """Replace the table's rows, and keep its shape."""
    _write(rows, "overwrite", path, app_id, watermark)


def append(path: str, rows: DataFrame, shape: TableShape, app_id: str, watermark: Lsn) -> None:
    """Add the numbered columns to the table's rows."""
    _write(rows.select(*target_columns(shape)), "append", path, app_id, watermark)


def run_merge(
    spark: SparkSession, rows: DataFrame, statement: str, app_id: str, watermark: Lsn
) -> tuple[int, int, int]:
    """Run a MERGE whose source is `SOURCE_VIEW`; count inserted, updated and deleted rows.

    Args:
        spark: a session that nobody else uses: Delta takes the application transaction of a MERGE
            from its settings.
    """
    rows.createOrReplaceTempView(SOURCE_VIEW)
    with _transaction(spark, app_id, watermark):
        result = spark.sql(statement).collect()
    if not result:
        return 0, 0, 0
    counts = result[0].asDict()
    return (
        int(counts["num_inserted_rows"]),
        int(counts["num_updated_rows"]),
        int(counts["num_deleted_rows"]),
    )


def _write(rows: DataFrame, mode: str, path: str, app_id: str, watermark: Lsn) -> None:
    (
        rows.write.format("delta")
        .mode(mode)
        .option("txnAppId", app_id)
        .option("txnVersion", str(int(watermark)))
        .save(path)
    )


@contextmanager
def _transaction(spark: SparkSession, app_id: str, version: Lsn) -> Iterator[None]:
    """Have what is committed in this session carry the application transaction."""
    spark.conf.set("spark.databricks.delta.write.txnAppId", app_id)
    spark.conf.set("spark.databricks.delta.write.txnVersion", str(int(version)))
    try:
        yield
    finally:
        spark.conf.unset("spark.databricks.delta.write.txnAppId")
        spark.conf.unset("spark.databricks.delta.write.txnVersion")
