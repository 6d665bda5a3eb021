"""Schema evolution: the table's columns follow the source's columns before a merge.

A column that was added is added, and the rows from before get its default. Other changes cannot be
replayed from the stream and are refused when the schema is built (`fold/schema.py`), until the
table is re-snapshot. A table that keeps what came before the snapshot then gives a column its new
type, and its old values with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pgcdc_assets.errors import SchemaChangeError
from pgcdc_assets.merge.fold.table_schema import Field, TableSchema
from pgcdc_assets.merge.fold.typed_columns import name_columns
from pgcdc_assets.merge.write import alter_all, overwrite_schema, table_properties
from pgcdc_assets.spark.sql import delta_table, identifier, string
from pgcdc_assets.tables.columns import RESCUED, normalize_name
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.owned_columns import OwnedColumns
from pgcdc_assets.tables.properties import CHOSEN_TYPES, OURS
from pgcdc_assets.tables.state import ScdState

# Which columns a merge adds and fills, and the fence of the state that it found.
_FILL = "pgcdc.fill"

# Table features, and the types in SQL and in Delta's log that need these features.
_FEATURES = {
    "delta.feature.timestampNtz": "timestamp_ntz",
    "delta.feature.variantType": "variant",
}

_EMPTY = "CAST(map() AS MAP<STRING, STRING>)"


def fields_to_fill(state: ScdState, schema: TableSchema) -> list[Field]:
    """Find the columns whose default the existing rows of the table lack.

    These are the missing columns, and the columns that an interrupted merge has added.
    """
    interrupted: set[str] = set()
    known = set(map(normalize_name, state.columns))
    noted = json.loads(state.properties.get(_FILL, "{}"))
    # Every write changes the fence: after another write the rows were filled or replaced.
    if noted.get("fence") == state.fence:
        interrupted = set(noted["columns"])
    return [
        field
        for field in schema.fields
        if field.default is not None
        and (normalize_name(field.name) not in known or field.name in interrupted)
    ]


def add_columns(
    spark: SparkSession, state: ScdState, schema: TableSchema, filled: Sequence[Field] = ()
) -> None:
    """Add missing fields to the table; each step can be repeated after a crash.

    Args:
        filled: fields for which `fill_columns` follows; they are recorded in the table.
    """
    path = state.path
    known = set(map(normalize_name, state.columns))
    missing = [
        i for i, field in enumerate(schema.fields) if normalize_name(field.name) not in known
    ]
    if not missing:
        return
    table = delta_table(path)
    properties = {**table_properties(schema), **_features(schema)}
    if filled:
        noted = {"fence": state.fence, "columns": [field.name for field in filled]}
        properties[_FILL] = json.dumps(noted)
    _set(spark, path, properties)
    for i in missing:
        field = schema.fields[i]
        place = f"AFTER {identifier(schema.fields[i - 1].name)}" if i else "FIRST"
        spark.sql(
            f"ALTER TABLE {table} ADD COLUMNS ({identifier(field.name)} {field.type.ddl} "
            f"COMMENT {string(field.comment)} {place})"
        )


def fill_columns(
    spark: SparkSession, path: str, fields: Sequence[Field], condition: str, step: Step
) -> None:
    """Write the defaults of added columns to all rows of the table, in one commit.

    For columns `n` (DEFAULT 5) and `x` (DEFAULT 'NaN', which no DECIMAL holds) the clause is

        WHEN NOT MATCHED BY SOURCE THEN UPDATE SET
          `n` = try_cast('5' AS INT), `x` = try_cast('NaN' AS DECIMAL(5,2)),
          `_rescued` = ... map_filter(map('n', IF(... IS NULL, '5', NULL), ...), value IS NOT NULL)

    Args:
        condition: SQL that is true for the rows `t` that represent a row of the source.
    """
    texts = {field.name: string(field.default or "") for field in fields}
    values = {field.name: field.type.expression(texts[field.name]) for field in fields}
    updates = [f"{identifier(name)} = {value}" for name, value in values.items()]
    typed = [field.name for field in fields if not field.type.is_text]
    if typed:
        entries = ", ".join(
            f"{string(name)}, IF({values[name]} IS NULL, {texts[name]}, NULL)" for name in typed
        )
        before = f"coalesce(t._rescued, {_EMPTY})"
        updates.append(f"_rescued = {_rescued_sql(before, entries)}")
    clause = f"WHEN NOT MATCHED BY SOURCE AND {condition} THEN UPDATE SET {', '.join(updates)}"
    alter_all(spark, path, clause, step)


def retype_columns(
    spark: SparkSession, path: str, schema: TableSchema, partitioned_by: Sequence[str], step: Step
) -> bool:
    """Rewrite the table in one commit if its columns have other types than the schema.

    A name whose case changed is renamed. A value that the new type cannot hold exactly is kept as
    text in `_rescued`.

    Returns:
        Whether the table was rewritten.

    Raises:
        SchemaChangeError: an array became a scalar, or a scalar became an array.
    """
    rows = spark.read.format("delta").load(path)
    by_name = {normalize_name(field.name): field for field in schema.fields}
    renamed = {
        column.name: by_name[normalize_name(column.name)].name
        for column in rows.schema
        if by_name.get(normalize_name(column.name), column).name != column.name
    }
    there = {
        renamed.get(column.name, column.name): column.dataType.simpleString()
        for column in rows.schema
    }
    wanted = _types_of(spark, schema)
    changed = {
        field.name: field
        for field, ddl in zip(schema.fields, wanted, strict=True)
        if there[field.name] != ddl
    }
    if not changed and not renamed:
        return False
    rows = _renamed(rows, renamed)
    for name, field in changed.items():
        if field.chosen is None and there[name].startswith("array") != field.type.ddl.startswith(
            "ARRAY"
        ):
            raise SchemaChangeError(
                relation=schema.relation.qualified_name,
                column=name,
                reason=f"its type changed from {there[name]} to {field.comment}, which its earlier "
                "values do not have",
            )
    _set(spark, path, {**table_properties(schema), **_features(schema)})
    names = ", ".join(map(string, changed))
    entries = ", ".join(
        f"{string(name)}, IF({_typed(field, there[name])} IS NULL, {_text(field, there[name])}, "
        "NULL)"
        for name, field in changed.items()
    )
    new = {name: F.expr(_typed(field, there[name])) for name, field in changed.items()}
    if changed:
        kept = f"map_filter(coalesce(_rescued, {_EMPTY}), (k, v) -> k NOT IN ({names}))"
        new[RESCUED] = F.expr(_rescued_sql(kept, entries))
    columns = []
    for column in rows.schema:
        value = new.get(column.name, F.col(identifier(column.name)))
        metadata = dict(column.metadata)
        if column.name in changed:
            metadata["comment"] = changed[column.name].comment
        columns.append(value.alias(column.name, metadata=metadata))
    overwrite_schema(rows.select(*columns), path, step, partitioned_by)
    return True


def _rescued_sql(before: str, entries: str) -> str:
    """Write the SQL of `_rescued` with additional texts; NULL for an empty map.

    Args:
        before: the SQL of the map so far.
        entries: names and texts in turn; a NULL text is left out.
    """
    texts = f"map_concat({before}, map_filter(map({entries}), (k, v) -> v IS NOT NULL))"
    return f"IF(size({texts}) = 0, NULL, {texts})"


def _renamed(rows: DataFrame, renamed: Mapping[str, str]) -> DataFrame:
    """Rename columns in the table and in `_rescued`."""
    if not renamed:
        return rows
    names = " ".join(f"WHEN {string(old)} THEN {string(new)}" for old, new in renamed.items())
    rescued = F.expr(f"transform_keys(_rescued, (k, v) -> CASE k {names} ELSE k END)")
    return rows.select(
        *(
            (rescued if column.name == RESCUED else F.col(identifier(column.name))).alias(
                renamed.get(column.name, column.name), metadata=dict(column.metadata)
            )
            for column in rows.schema
        )
    )


def replace_table(
    spark: SparkSession,
    rows: DataFrame,
    schema: TableSchema,
    state: ScdState,
    owned: OwnedColumns,
    step: Step,
) -> None:
    """Replace rows and columns by the numbered columns, and keep the owner's part of the table.

    Properties, constraints, clustering and the table's comment stay. The owner's columns are NULL
    in the new rows.
    """
    missing = {
        name: value
        for name, value in _features(schema).items()
        if _FEATURES[name] not in state.schema
    }
    if missing:
        _set(spark, state.path, missing)
    set_properties(spark, state.path, state.properties, schema)
    _overwrite(spark, rows.select(*name_columns(schema, owned.comments)), state.path, owned, step)


def overwrite_by_spark(
    spark: SparkSession,
    source: str,
    path: str,
    owned: OwnedColumns,
    partitioned_by: Sequence[str],
    step: Step,
) -> None:
    """Replace a table's rows and columns by those of another, and keep the owner's part."""
    rows = spark.read.format("delta").load(source)
    described = []
    for field in rows.schema:
        comment = owned.comments.get(normalize_name(field.name), field.metadata.get("comment"))
        metadata = {} if comment is None else {"comment": comment}
        described.append(F.col(identifier(field.name)).alias(field.name, metadata=metadata))
    _overwrite(spark, rows.select(*described), path, owned, step, partitioned_by)


def _overwrite(
    spark: SparkSession,
    rows: DataFrame,
    path: str,
    owned: OwnedColumns,
    step: Step,
    partitioned_by: Sequence[str] = (),
) -> None:
    known = set(map(normalize_name, rows.columns))
    theirs = []
    for field in StructType.fromJson({"fields": list(owned.fields)}):
        if normalize_name(field.name) not in known:
            metadata = {k: v for k, v in field.metadata.items() if not k.startswith("delta.")}
            column = F.col(identifier(field.name))
            theirs.append(column.alias(field.name, metadata=metadata))
    ours = [F.col(identifier(name)) for name in rows.columns]
    if theirs:
        # Over Spark Connect a cast to a string type names its collation, which delta-rs refuses.
        # So the types come from the table.
        empty = spark.read.format("delta").load(path).where("false").select(*theirs)
        rows = rows.unionByName(empty, allowMissingColumns=True)
    described = spark.sql(f"DESCRIBE DETAIL {delta_table(path)}").collect()[0]
    clustered_by = [
        name for name in described["clusteringColumns"] if normalize_name(name) in known
    ]
    overwrite_schema(rows.select(*ours, *theirs), path, step, partitioned_by)
    if clustered_by:
        # An overwrite of the schema removes the clustering.
        columns = ", ".join(map(identifier, clustered_by))
        spark.sql(f"ALTER TABLE {delta_table(path)} CLUSTER BY ({columns})")


def set_properties(
    spark: SparkSession, path: str, existing: Mapping[str, str], schema: TableSchema
) -> None:
    """Record the relation of the table's contents; the owner's properties stay."""
    properties = table_properties(schema)
    if CHOSEN_TYPES in existing:
        properties.setdefault(CHOSEN_TYPES, "{}")
    changed = {
        name: value
        for name, value in properties.items()
        if existing.get(name) != value and (name.startswith(OURS) or name not in existing)
    }
    if changed:
        _set(spark, path, changed)


def _features(schema: TableSchema) -> dict[str, str]:
    """Return the table features that Delta does not add to an existing table."""
    types = {field.type.ddl.lower() for field in schema.fields}
    return {
        feature: "supported"
        for feature, kind in _FEATURES.items()
        if any(kind in ddl for ddl in types)
    }


def _types_of(spark: SparkSession, schema: TableSchema) -> list[str]:
    nulls = (
        f"CAST(NULL AS {field.type.ddl}) AS value_{i}" for i, field in enumerate(schema.fields)
    )
    types = spark.sql(f"SELECT {', '.join(nulls)}").schema
    return [field.dataType.simpleString() for field in types]


def _text(field: Field, before: str) -> str:
    """Write the SQL of a column's value as the text that Postgres would print."""
    name = identifier(field.name)
    printed = {
        "binary": f"concat(r'\\x', lower(hex({name})))",
        "timestamp": f"concat(CAST({name} AS STRING), '+00')",
    }.get(before, f"CAST({name} AS STRING)")
    return f"coalesce({printed}, try_element_at(_rescued, {string(field.name)}))"


def _typed(field: Field, before: str) -> str:
    """Write the SQL of a column's value in its new type; NULL if the type cannot hold it."""
    if before.startswith("array"):
        return f"try_cast({identifier(field.name)} AS {field.type.ddl})"
    typed = field.type.expression(_text(field, before))
    if field.type.is_text or field.chosen is not None:
        return typed
    # A cast to fewer digits rounds.
    return f"IF(try_cast({typed} AS {before}) <=> {identifier(field.name)}, {typed}, NULL)"


def _set(spark: SparkSession, path: str, properties: dict[str, str]) -> None:
    spark.sql(f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES ({_assignments(properties)})")


def _assignments(properties: dict[str, str]) -> str:
    return ", ".join(f"{string(name)} = {string(value)}" for name, value in properties.items())
