"""Writing SCD tables: each function is one Delta commit that carries a step: fence and watermark.

Delta leaves a write out whose fence the table has already, so a repeat and an overtaken merge
change nothing (`tables/fence.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.fold.typed_columns import name_columns
from pgcdc_assets.spark.sql import delta_table, identifier
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.properties import BEGINS_WITH, KEY, RELATION_ID, RELATION_VERSION, key_text

SOURCE_VIEW = "pgcdc_source"

# SQL that a source row `s` comes later in the stream than the table's row `t`.
NEWER = "(s.lsn > t._lsn OR (s.lsn = t._lsn AND s.ordinal > t._ordinal))"

_NEEDS_MAPPING = frozenset(" ,;{}()\n\t=")
# How many columns, from the left, Delta keeps statistics of; ours stand at the right.
_WITH_STATISTICS = 32


def table_properties(schema: TableSchema) -> dict[str, str]:
    """Give the properties of a table of this schema."""
    properties = {
        # A MERGE then marks rows as deleted instead of writing their files anew.
        "delta.enableDeletionVectors": "true",
        KEY: key_text(schema.key_names),
        RELATION_ID: str(schema.relation.relation_id),
        RELATION_VERSION: str(schema.version),
    }
    width = len(schema.fields) + len(schema.system)
    if width > _WITH_STATISTICS:
        # A check of what a merge touched would read every file of a wide table.
        properties["delta.dataSkippingNumIndexedCols"] = str(width)
    if any(_NEEDS_MAPPING & set(field.name) for field in schema.fields):
        properties["delta.columnMapping.mode"] = "name"
    return properties


def create_or_replace(
    path: str,
    rows: DataFrame,
    schema: TableSchema,
    step: Step,
    partitioned_by: Sequence[str] = (),
    begins_with: str | None = None,
) -> None:
    """Write the numbered columns as the table's whole contents, in a table of this schema.

    Args:
        begins_with: the position of the snapshot that a table begins with which is never replaced:
            from there on a rebuild has to fold, and no less.
    """
    writer = rows.select(*name_columns(schema)).writeTo(delta_table(path)).using("delta")
    writer = writer.options(**step.options)
    if partitioned_by:
        writer = writer.partitionedBy(*map(F.col, partitioned_by))
    for name, value in table_properties(schema).items():
        writer = writer.tableProperty(name, value)
    if begins_with is not None:
        writer = writer.tableProperty(BEGINS_WITH, begins_with)
    writer.createOrReplace()


def replace_contents(path: str, rows: DataFrame, schema: TableSchema, step: Step) -> None:
    """Replace the table's rows by the numbered columns, and keep its schema."""
    overwrite(rows.select(*name_columns(schema)), path, step)


def overwrite(rows: DataFrame, path: str, step: Step) -> None:
    """Replace the table's rows, and keep its schema."""
    _save(rows.write, "overwrite", path, step)


def overwrite_schema(
    rows: DataFrame, path: str, step: Step, partitioned_by: Sequence[str] = ()
) -> None:
    """Replace the table's rows and columns; its properties stay."""
    writer = rows.write.option("overwriteSchema", "true").partitionBy(*partitioned_by)
    _save(writer, "overwrite", path, step)


def overwrite_with_new_columns(rows: DataFrame, path: str, step: Step) -> None:
    """Replace the table's rows by rows that have further columns."""
    _save(rows.write.option("mergeSchema", "true"), "overwrite", path, step)


def replace_where(
    spark: SparkSession,
    rows: DataFrame,
    path: str,
    condition: str,
    step: Step,
) -> None:
    """Replace the table's rows for which a condition holds by others, for which it need not hold.

    Args:
        spark: a session that nobody else uses.
        rows: with the table's columns.
    """
    writer = rows.write.option("replaceWhere", condition)
    with _set(spark, {"spark.databricks.delta.replaceWhere.constraintCheck.enabled": "false"}):
        _save(writer, "overwrite", path, step)


def append(path: str, rows: DataFrame, schema: TableSchema, step: Step) -> None:
    """Add the numbered columns to the table's rows."""
    _save(rows.select(*name_columns(schema)).write, "append", path, step)


def values_by_name(schema: TableSchema) -> list[tuple[str, str]]:
    """Pair each column of the table with the SQL of its value in `SOURCE_VIEW` `s`."""
    values = [(identifier(field.name), f"s.value_{i}") for i, field in enumerate(schema.fields)]
    return values + [(name, f"s.{name.removeprefix('_')}") for name, _, _ in schema.system]


def insert_sql(values: Sequence[tuple[str, str]]) -> str:
    """Write what a MERGE inserts, given columns and the SQL of their values."""
    names, expressions = zip(*values, strict=True)
    return f"INSERT ({', '.join(names)}) VALUES ({', '.join(expressions)})"


def alter_all(spark: SparkSession, path: str, clause: str, step: Step) -> int:
    """Update rows by a `WHEN NOT MATCHED BY SOURCE` clause alone; give their number."""
    nothing = spark.sql("SELECT 1 AS nothing WHERE false")
    statement = f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s ON false\n{clause}"
    _, updated, _ = run_merge(spark, nothing, statement, step)
    return updated


def compute_once(rows: DataFrame) -> DataFrame:
    """Compute the rows of a large merge now, for what reads them several times."""
    # Spark makes a filter of keys only from rows that it takes for a selection. No ordinal is less.
    return rows.localCheckpoint().where("ordinal >= -1")


def run_merge(
    spark: SparkSession,
    rows: DataFrame,
    statement: str,
    step: Step,
    *,
    is_computed: bool = False,
) -> tuple[int, int, int]:
    """Run a MERGE whose source is `SOURCE_VIEW`; count inserted, updated and deleted rows.

    Args:
        spark: a session that nobody else uses: Delta takes the application transaction of a MERGE
            from its settings.
        is_computed: the rows are those of `compute_once`. Delta would otherwise keep a copy of
            them, because a source that is not a Delta table may change between the passes of the
            MERGE.
    """
    rows.createOrReplaceTempView(SOURCE_VIEW)
    settings = step.settings
    if is_computed:
        settings["spark.databricks.delta.merge.materializeSource"] = "none"
    with _set(spark, settings):
        result = spark.sql(statement).collect()
    if not result:
        return 0, 0, 0
    counts = result[0].asDict()
    return (
        int(counts["num_inserted_rows"]),
        int(counts["num_updated_rows"]),
        int(counts["num_deleted_rows"]),
    )


def _save(writer: DataFrameWriter, mode: str, path: str, step: Step) -> None:
    writer.format("delta").mode(mode).options(**step.options).save(path)


@contextmanager
def _set(spark: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)
