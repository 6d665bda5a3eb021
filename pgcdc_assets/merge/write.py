"""Writing SCD tables: each function is one Delta commit that carries a step: fence and watermark.

Delta skips a write as a duplicate transaction if the table has its fence already, so neither a
repeat nor an overtaken merge changes the table (`tables/fence.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.spark.computed_rows import compute_rows
from pgcdc_assets.spark.session_settings import session_settings
from pgcdc_assets.spark.sql import delta_table, identifier
from pgcdc_assets.tables.columns import normalize_name
from pgcdc_assets.tables.comments import digests_text
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.properties import (
    BEGINS_WITH,
    CHOSEN_TYPES,
    COMMENTS,
    KEY,
    MAPPING,
    RELATION_ID,
    RELATION_VERSION,
    key_text,
)
from pgcdc_assets.tables.source_columns import SOURCE

SOURCE_VIEW = "pgcdc_source"

# SQL that a source row `s` comes later in the stream than the table's row `t`. A row that another
# program has added has no position, and each change is later.
NEWER = "(t._lsn IS NULL OR s.lsn > t._lsn OR (s.lsn = t._lsn AND s.ordinal > t._ordinal))"

_NEEDS_MAPPING = frozenset(" ,;{}()\n\t=")
# Delta keeps statistics of so many columns, from the left. The system columns are the last ones.
_WITH_STATISTICS = 32

# An overwrite without a condition replaces the table, and so removes its clustering.
_EVERY_ROW = "replaceWhere", "true"

_CONSTRAINT_CHECK = "spark.databricks.delta.replaceWhere.constraintCheck.enabled"


def table_properties(schema: TableSchema) -> dict[str, str]:
    """Return the properties of a table with this schema."""
    properties = {
        # A MERGE then marks rows as deleted instead of rewriting their files.
        "delta.enableDeletionVectors": "true",
        KEY: key_text(schema.key_names),
        RELATION_ID: str(schema.relation.relation_id),
        RELATION_VERSION: str(schema.version),
    }
    comments = {field.comment for field in schema.fields if field.is_commented}
    if comments or schema.description:
        properties[COMMENTS] = digests_text(comments | {schema.description} - {""})
    if schema.chosen_types:
        properties[CHOSEN_TYPES] = json.dumps(schema.chosen_types, sort_keys=True)
    # The parts of a struct count one by one.
    width = sum(1 + field.type.ddl.count(":") for field in schema.fields) + len(schema.system)
    if width > _WITH_STATISTICS:
        # Without it, the check of a merge's rows would read all files of a wide table.
        properties["delta.dataSkippingNumIndexedCols"] = str(width)
    if any(_NEEDS_MAPPING & set(field.name) for field in schema.fields):
        properties[MAPPING] = "name"
    return properties


def name_columns(schema: TableSchema, comments: Mapping[str, str] | None = None) -> list[Column]:
    """Return the numbered columns with the names and comments of the table.

    Args:
        comments: the owner's comments by normalized name.
    """
    kept = comments or {}

    def named(number: str, name: str, comment: str, source: str | None = None) -> Column:
        metadata = {"comment": kept.get(normalize_name(name), comment)}
        if source is not None:
            metadata[SOURCE] = source
        return F.col(number).alias(name, metadata=metadata)

    fields = enumerate(schema.fields)
    columns = [named(f"value_{i}", f.name, f.comment, f.source) for i, f in fields]
    return columns + [
        named(name.removeprefix("_"), name, comment) for name, _, comment in schema.system
    ]


def create_or_replace(
    path: str,
    rows: DataFrame,
    schema: TableSchema,
    step: Step,
    partitioned_by: Sequence[str] = (),
    begins_with: str | None = None,
) -> None:
    """Create or replace a table with this schema, and write the numbered columns to it.

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
    if schema.description:
        writer = writer.tableProperty("comment", schema.description)
    if begins_with is not None:
        writer = writer.tableProperty(BEGINS_WITH, begins_with)
    writer.createOrReplace()


def replace_contents(path: str, rows: DataFrame, schema: TableSchema, step: Step) -> None:
    """Replace the table's rows by the numbered columns, and keep its columns."""
    overwrite(rows.select(*name_columns(schema)), path, step)


def overwrite(rows: DataFrame, path: str, step: Step) -> None:
    """Replace the table's rows, and keep its columns."""
    _save(rows.write.option(*_EVERY_ROW), "overwrite", path, step)


def overwrite_with_new_columns(rows: DataFrame, path: str, step: Step) -> None:
    """Replace the table's rows by rows with additional columns."""
    writer = rows.write.option("mergeSchema", "true").option(*_EVERY_ROW)
    _save(writer, "overwrite", path, step)


def replace_where(
    spark: SparkSession,
    rows: DataFrame,
    path: str,
    condition: str,
    step: Step,
) -> None:
    """Replace the rows for which a condition is true by other rows.

    Args:
        spark: a session that no other thread uses at the same time.
        rows: with the columns of the table; the condition may be false for them.
    """
    writer = rows.write.option("replaceWhere", condition)
    with session_settings(spark, {_CONSTRAINT_CHECK: "false"}):
        _save(writer, "overwrite", path, step)


def append(path: str, rows: DataFrame, schema: TableSchema, step: Step) -> None:
    """Append the numbered columns to the table."""
    _save(rows.select(*name_columns(schema)).write, "append", path, step)


def values_by_name(schema: TableSchema) -> list[tuple[str, str]]:
    """Pair each column of the table with the SQL of its value in `SOURCE_VIEW` `s`."""
    values = [(identifier(field.name), f"s.value_{i}") for i, field in enumerate(schema.fields)]
    return values + [(name, f"s.{name.removeprefix('_')}") for name, _, _ in schema.system]


def insert_sql(values: Sequence[tuple[str, str]]) -> str:
    """Write the INSERT clause of a MERGE from columns and the SQL of their values."""
    names, expressions = zip(*values, strict=True)
    return f"INSERT ({', '.join(names)}) VALUES ({', '.join(expressions)})"


def alter_all(spark: SparkSession, path: str, clause: str, step: Step) -> int:
    """Update rows by a `WHEN NOT MATCHED BY SOURCE` clause alone; return their number."""
    nothing = spark.sql("SELECT 1 AS nothing WHERE false")
    statement = f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s ON false\n{clause}"
    _, updated, _ = run_merge(spark, nothing, statement, step)
    return updated


def compute_once(rows: DataFrame) -> DataFrame:
    """Compute the rows of a large merge now, because the MERGE reads them several times."""
    # Spark builds a runtime Bloom filter only if the source has a selective predicate. This one is
    # always true.
    return compute_rows(rows).where("ordinal >= -1")


def run_merge(
    spark: SparkSession,
    rows: DataFrame,
    statement: str,
    step: Step,
    *,
    is_computed: bool = False,
) -> tuple[int, int, int]:
    """Run a MERGE whose source is `SOURCE_VIEW`; return inserted, updated and deleted counts.

    Args:
        spark: a session that no other thread uses at the same time: Delta reads the application
            transaction of a MERGE from the session's settings.
        is_computed: the rows come from `compute_once`. Otherwise Delta materialises the source,
            because a source that is not a Delta table may change between the passes of the MERGE.
    """
    rows.createOrReplaceTempView(SOURCE_VIEW)
    settings = step.settings
    if is_computed:
        settings["spark.databricks.delta.merge.materializeSource"] = "none"
    with session_settings(spark, settings):
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
