"""Renamed, dropped and retyped columns of a table, in one rewrite of its rows.

The commit contains all rows in the new schema. The metadata of each column identifies the column of
the source, so the columns are known even if the merge dies directly after the commit.
Delta's column mapping and type widening would change the metadata alone. delta-rs can neither
commit to a table with type widening nor read its deletion vectors, and many readers of tables read
neither feature (docs/decisions/0036-changed-columns-are-rewritten.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pgcdc_assets import failpoints
from pgcdc_assets.errors import MergeConflict, TableRefused, rebuild_command
from pgcdc_assets.merge.fold.table_schema import Field, TableSchema
from pgcdc_assets.merge.fold.type_changes import date_as_timestamp
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.spark.sql import delta_table, identifier, string
from pgcdc_assets.tables.columns import RESCUED, normalize_name
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.properties import CLUSTERED_BY
from pgcdc_assets.tables.source_columns import SOURCE, TableColumn, is_certain, source_of

EMPTY_MAP = "CAST(map() AS MAP<STRING, STRING>)"
_WHOLE_NUMBERS = frozenset({"smallint", "int", "bigint"})
_WITH_FRACTIONS = ("DECIMAL", "FLOAT", "DOUBLE")


@dataclass(frozen=True)
class ColumnChanges:
    """The changes of a table's columns that a schema requires.

    Attributes:
        fields: the fields of the table's columns, by the names in the table.
        names: the present names in the table and the new ones, of renamed columns.
        types: the present types of columns with another type, by the new name.
        removed: names of the columns that the source has dropped.
        missing: indexes of the fields without a column.
    """

    fields: Mapping[str, Field]
    names: Mapping[str, str]
    types: Mapping[str, str]
    removed: tuple[str, ...]
    missing: tuple[int, ...]

    @property
    def needs_rewrite(self) -> bool:
        """Whether the rows have to be written again."""
        return bool(self.names or self.types or self.removed)


def find_column_changes(columns: Sequence[TableColumn], schema: TableSchema) -> ColumnChanges:
    """Compare the columns of a table with the fields of a schema.

    A column that the schema leaves out is removed if the source had the column: a schema of a
    table that shows the past has all of them.

    Raises:
        MergeConflict: a column of the table's owner has the name of a new or renamed column.
    """
    found = _match(columns, schema)
    fields = {column.name: schema.fields[index] for index, column in found.items()}
    ours = set(fields)
    removed = [c.name for c in columns if c.name not in ours and c.source is not None]
    names = {name: field.name for name, field in fields.items() if name != field.name}
    theirs = {normalize_name(c.name): c.name for c in columns if c.name not in {*ours, *removed}}
    missing = tuple(i for i in range(len(schema.fields)) if i not in found)
    table = schema.relation.qualified_name
    for name in (*names.values(), *(schema.fields[i].name for i in missing)):
        if normalize_name(name) in theirs:
            raise MergeConflict(
                table=table,
                reason=f'a column of the source is now called "{name}", and the Delta table has a '
                "column of its owner with this name. Rename that column, or rebuild the table, "
                "which removes it",
                command=rebuild_command,
            )
    types = {
        fields[column.name].name: column.type
        for column in found.values()
        if column.type != fields[column.name].type.ddl.lower()
    }
    return ColumnChanges(fields, names, types, tuple(removed), missing)


def check_none_lost(
    path: str, changes: ColumnChanges, schema: TableSchema, followed: RelationVersion | None
) -> None:
    """Check that the table has the columns that its rows follow.

    A merge would add a column again that the owner has dropped, and NULL would look like its value
    in all rows that do not change any more.

    Args:
        followed: the relation version that the rows follow; None if it is not known.

    Raises:
        TableRefused: the table lacks such a column.
    """
    if followed is None:
        return
    written = {source_of(followed, column) for column in followed.relation.columns}
    missing = [schema.fields[index] for index in changes.missing]
    lost = [each for each in missing if each.source in written and not each.is_retained]
    if not lost:
        return
    names = ", ".join(f'"{each.name}"' for each in lost)
    columns = ", ".join(f"{identifier(each.name)} {each.type.ddl}" for each in lost)
    raise TableRefused(
        table=schema.relation.qualified_name,
        reason=f"the Delta table {path} lacks {names}, which the source has and earlier merges "
        "have written. If its owner has dropped or renamed the column, run in Spark: ALTER TABLE "
        f"{delta_table(path)} ADD COLUMNS ({columns}); the value is then NULL in each row until "
        "the row changes at the source. Or rebuild the table, which gives its rows the values "
        "again",
        command=rebuild_command,
    )


def _match(columns: Sequence[TableColumn], schema: TableSchema) -> dict[int, TableColumn]:
    """Find the column of each field: the same column of the source, otherwise the same name.

    If a table identifies columns of the source, its other columns are not the source's.
    """
    by_source = {column.source: column for column in columns if column.source is not None}
    found = {
        index: by_source[field.source]
        for index, field in enumerate(schema.fields)
        if field.source in by_source
    }
    matched = {column.name for column in found.values()}
    prefix = schema.source_prefix
    by_name = {
        normalize_name(c.name): c
        for c in columns
        if c.name not in matched and not c.is_dropped and (c.source is not None or not by_source)
    }
    for index, field in enumerate(schema.fields):
        column = by_name.get(normalize_name(field.name))
        if index in found or field.is_retained or column is None:
            continue
        if not (is_certain(column.source, prefix) and is_certain(field.source, prefix)):
            found[index] = column
    return found


def rewrite_columns(
    spark: SparkSession,
    path: str,
    changes: ColumnChanges,
    partitioned_by: Sequence[str],
    step: Step,
) -> None:
    """Rename, remove and retype columns in one commit.

    A value that the new type cannot hold exactly is kept as text in `_rescued`.
    """
    rows = _named(spark.read.format("delta").load(path), changes)
    by_name = {field.name: field for field in changes.fields.values()}
    new = {}
    if changes.types:
        entries = ", ".join(
            f"{string(name)}, IF({retyped_sql(by_name[name], before)} IS NULL, "
            f"{_text(by_name[name], before)}, NULL)"
            for name, before in changes.types.items()
        )
        names = ", ".join(map(string, changes.types))
        kept = f"map_filter(coalesce(_rescued, {EMPTY_MAP}), (k, v) -> k NOT IN ({names}))"
        new = {name: F.expr(retyped_sql(by_name[name], t)) for name, t in changes.types.items()}
        new[RESCUED] = F.expr(rescued_sql(kept, entries))
    columns = []
    for column in rows.schema:
        value = new.get(column.name, F.col(identifier(column.name)))
        metadata = _kept_metadata(column.metadata)
        field = by_name.get(column.name)
        if field is not None and field.source is not None:
            metadata[SOURCE] = field.source
        if field is not None and column.name in changes.types:
            metadata["comment"] = field.comment
        columns.append(value.alias(column.name, metadata=metadata))
    overwrite_clustered(spark, rows.select(*columns), path, step, partitioned_by, changes.names)


def overwrite_clustered(
    spark: SparkSession,
    rows: DataFrame,
    path: str,
    step: Step,
    partitioned_by: Sequence[str],
    renamed: Mapping[str, str],
) -> None:
    """Replace rows and columns, and cluster the table as before by the columns that remain.

    The properties of the table stay. An overwrite of the schema removes the clustering, and no
    writer of a path commits both: a property notes the columns, in case the process dies between.

    Args:
        renamed: new names by present names.
    """
    described = spark.sql(f"DESCRIBE DETAIL {delta_table(path)}").collect()[0]
    known = set(map(normalize_name, rows.columns))
    before = described["clusteringColumns"]
    if before:
        before = [renamed.get(name, name) for name in before]
    else:
        before = json.loads(described["properties"].get(CLUSTERED_BY, "[]"))
    clustered_by = [name for name in before if normalize_name(name) in known]
    if clustered_by:
        noted = string(json.dumps(clustered_by))
        spark.sql(
            f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES ({string(CLUSTERED_BY)} = {noted})"
        )
    writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    writer.partitionBy(*partitioned_by).options(**step.options).save(path)
    if clustered_by:
        failpoints.reach(failpoints.AFTER_CLUSTERED_OVERWRITE)
        _cluster(spark, path, clustered_by)


def finish_clustering(spark: SparkSession, path: str, properties: Mapping[str, str]) -> None:
    """Cluster a table as before an overwrite that did not end.

    Args:
        properties: of the table.
    """
    if CLUSTERED_BY not in properties:
        return
    described = spark.sql(f"DESCRIBE DETAIL {delta_table(path)}").collect()[0]
    # The process died before the overwrite, or the owner has clustered the table since.
    is_clustered = bool(described["clusteringColumns"])
    _cluster(spark, path, [] if is_clustered else json.loads(properties[CLUSTERED_BY]))


def _cluster(spark: SparkSession, path: str, names: Sequence[str]) -> None:
    """Cluster a table by columns, and remove the note of an unfinished overwrite."""
    table = delta_table(path)
    if names:
        spark.sql(f"ALTER TABLE {table} CLUSTER BY ({', '.join(map(identifier, names))})")
    spark.sql(f"ALTER TABLE {table} UNSET TBLPROPERTIES IF EXISTS ({string(CLUSTERED_BY)})")


def rescued_sql(before: str, entries: str) -> str:
    """Write the SQL of `_rescued` with additional texts; NULL for an empty map.

    Args:
        before: the SQL of the map so far.
        entries: names and texts in turn; a NULL text is left out.
    """
    texts = f"map_concat({before}, map_filter(map({entries}), (k, v) -> v IS NOT NULL))"
    return f"IF(size({texts}) = 0, NULL, {texts})"


def _named(rows: DataFrame, changes: ColumnChanges) -> DataFrame:
    """Rename and remove columns in the table and in `_rescued`."""
    rescued = F.col(RESCUED)
    if changes.names or changes.removed:
        texts = f"coalesce(_rescued, {EMPTY_MAP})"
        if changes.removed:
            gone = ", ".join(map(string, changes.removed))
            texts = f"map_filter({texts}, (k, v) -> k NOT IN ({gone}))"
        if changes.names:
            cases = " ".join(
                f"WHEN {string(old)} THEN {string(new)}" for old, new in changes.names.items()
            )
            texts = f"transform_keys({texts}, (k, v) -> CASE k {cases} ELSE k END)"
        rescued = F.expr(f"IF(size({texts}) = 0, NULL, {texts})")
    return rows.select(
        *(
            (rescued if column.name == RESCUED else F.col(identifier(column.name))).alias(
                changes.names.get(column.name, column.name), metadata=dict(column.metadata)
            )
            for column in rows.schema
            if column.name not in changes.removed
        )
    )


def _kept_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return a column's metadata without what Delta assigns."""
    return {k: v for k, v in metadata.items() if not k.startswith("delta.columnMapping.")}


def _text(field: Field, before: str) -> str:
    """Write the SQL of a column's value as the text that Postgres would print."""
    name = identifier(field.name)
    rescued = f"try_element_at(_rescued, {string(field.name)})"
    if before == "date" and field.type.ddl == "TIMESTAMP_NTZ":
        rescued = date_as_timestamp(rescued)
    if before.startswith("array"):
        return f"coalesce({_array_text(name, before)}, {rescued})"
    printed = {
        "binary": f"concat(r'\\x', lower(hex({name})))",
        "timestamp": f"concat(CAST({name} AS STRING), '+00')",
    }.get(before, f"CAST({name} AS STRING)")
    return f"coalesce({printed}, {rescued})"


def _array_text(name: str, before: str) -> str:
    """Write the SQL of an array as Postgres prints it: `{1,NULL,"a b"}`."""
    element = "concat(CAST(e AS STRING), '+00')" if "timestamp>" in before else "CAST(e AS STRING)"
    quoted = f"""concat('"', regexp_replace({element}, r'(["\\\\])', r'\\\\$1'), '"')"""
    special = r"""[{}",\\\s]"""
    plain = (
        f"(length({element}) > 0 AND NOT {element} RLIKE r'{special}' "
        f"AND lower({element}) <> 'null')"
    )
    item = f"CASE WHEN e IS NULL THEN 'NULL' WHEN {plain} THEN {element} ELSE {quoted} END"
    return f"concat('{{', array_join(transform({name}, e -> {item}), ','), '}}')"


def retyped_sql(field: Field, before: str) -> str:
    """Write the SQL of a column's value in its new type; NULL if the type cannot hold it.

    Args:
        before: the column's present type, as Spark's `simpleString` names it.
    """
    name = identifier(field.name)
    if before == "float" and field.type.ddl == "DOUBLE":
        return f"CAST({name} AS DOUBLE)"
    is_array = field.type.ddl.startswith("ARRAY")
    if before.startswith("array") and is_array:
        return f"try_cast({name} AS {field.type.ddl})"
    typed = field.type.expression(_text(field, before))
    if field.type.is_text or field.chosen is not None or before.startswith("array") or is_array:
        return typed
    if before in _WHOLE_NUMBERS and field.type.ddl.startswith(_WITH_FRACTIONS):
        # Spark does not read a text such as 5.00 as a whole number.
        return f"IF(try_cast({typed} AS {before}) <=> {name}, {typed}, NULL)"
    # A cast to fewer digits rounds. The way back is by text, because Spark has no cast between some
    # types, such as a number and a date.
    return f"IF(try_cast(CAST({typed} AS STRING) AS {before}) <=> {name}, {typed}, NULL)"
