"""Schema evolution: the table's columns follow the source's columns before a merge.

A column that the source has added is added to the table, and older rows get its default. After a
renamed, dropped or retyped column, the table is rewritten (`column_changes.py`). The last step
records the relation version that the table's columns follow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pgcdc_assets.merge.column_changes import EMPTY_MAP, overwrite_clustered, rescued_sql
from pgcdc_assets.merge.fold.table_schema import Field, TableSchema
from pgcdc_assets.merge.write import alter_all, name_columns, table_properties
from pgcdc_assets.spark.sql import delta_table, identifier, string
from pgcdc_assets.tables.columns import normalize_name
from pgcdc_assets.tables.comments import join_digests
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.merge_notes import (
    FILL,
    FOLLOWED,
    FollowedRelation,
    followed_relation,
    read_note,
    write_note,
)
from pgcdc_assets.tables.owned_columns import OwnedColumns
from pgcdc_assets.tables.properties import (
    CHOSEN_TYPES,
    COLUMNS,
    COMMENTS,
    KEY,
    MAPPING,
    OURS,
    RELATION,
)
from pgcdc_assets.tables.source_columns import SOURCE, TableColumn, columns_text
from pgcdc_assets.tables.state import ScdState

# Table features, and the types in SQL and in Delta's log that need these features.
_FEATURES = {
    "delta.feature.timestampNtz": "timestamp_ntz",
    "delta.feature.variantType": "variant",
}


def fields_to_fill(state: ScdState, schema: TableSchema) -> list[Field]:
    """Find the columns whose default the existing rows of the table lack.

    These are the missing columns, and the columns that an interrupted merge has added.
    """
    known = set(map(normalize_name, state.columns))
    noted = read_note(state, FILL)
    interrupted = set(noted["columns"]) if noted is not None else set()
    return [
        field
        for field in schema.fields
        if field.default is not None
        and (normalize_name(field.name) not in known or field.name in interrupted)
    ]


def add_columns(
    spark: SparkSession,
    state: ScdState,
    schema: TableSchema,
    columns: Sequence[TableColumn],
    filled: Sequence[Field],
    followed: FollowedRelation | None,
) -> None:
    """Add missing fields to the table; each step can be repeated after a crash.

    Args:
        columns: of the table.
        filled: fields for which `fill_columns` follows; they are recorded in the table.
        followed: as for `set_properties`.
    """
    path = state.path
    known = set(map(normalize_name, state.columns))
    missing = [
        i for i, field in enumerate(schema.fields) if normalize_name(field.name) not in known
    ]
    if not missing and not filled:
        return
    table = delta_table(path)
    properties = {**_relation_properties(state, schema, columns), **_features(schema)}
    # The rows follow in the next write, or in the write after `fill_columns`.
    through = state.fence + bool(filled)
    properties |= _note_followed(state, schema, followed, through)
    if filled:
        names = [field.name for field in filled]
        properties[FILL] = write_note(state, through, {"columns": names})
    _set(spark, path, properties)
    for i in missing:
        field = schema.fields[i]
        place = f"AFTER {identifier(schema.fields[i - 1].name)}" if i else "FIRST"
        spark.sql(
            f"ALTER TABLE {table} ADD COLUMNS ({identifier(field.name)} {field.type.ddl} "
            f"COMMENT {string(field.comment)} {place})"
        )


def allow_types(spark: SparkSession, state: ScdState, schema: TableSchema) -> None:
    """Turn on the table features that the columns of a schema need."""
    wanted = {
        name: value
        for name, value in _features(schema).items()
        if state.properties.get(name) != value
        and not (name in _FEATURES and _FEATURES[name] in state.schema)
    }
    if wanted:
        _set(spark, state.path, wanted)


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
    texts = {field.name: field.default_sql or "NULL" for field in fields}
    values = {field.name: field.type.expression(texts[field.name]) for field in fields}
    updates = [f"{identifier(name)} = {value}" for name, value in values.items()]
    typed = [field.name for field in fields if not field.type.is_text]
    if typed:
        entries = ", ".join(
            f"{string(name)}, IF({values[name]} IS NULL, {texts[name]}, NULL)" for name in typed
        )
        before = f"coalesce(t._rescued, {EMPTY_MAP})"
        updates.append(f"_rescued = {rescued_sql(before, entries)}")
    clause = f"WHEN NOT MATCHED BY SOURCE AND {condition} THEN UPDATE SET {', '.join(updates)}"
    alter_all(spark, path, clause, step)


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
    allow_types(spark, state, schema)
    set_properties(spark, state, schema, (), followed_relation(state))
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
        if SOURCE in field.metadata:
            metadata[SOURCE] = field.metadata[SOURCE]
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
    overwrite_clustered(spark, rows.select(*ours, *theirs), path, step, partitioned_by, {})


def follows_relation(state: ScdState, schema: TableSchema) -> bool:
    """Return whether a table records the relation and the key of a schema."""
    wanted = table_properties(schema)
    return all(state.properties.get(name) == wanted[name] for name in RELATION)


def set_properties(
    spark: SparkSession,
    state: ScdState,
    schema: TableSchema,
    columns: Sequence[TableColumn],
    followed: FollowedRelation | None,
) -> None:
    """Record the relation of the table's contents; the owner's properties stay.

    Args:
        columns: of the table; empty if a rewrite follows, which identifies them.
        followed: what the rows follow until the next write.
    """
    existing = state.properties
    properties = _relation_properties(state, schema, columns)
    properties |= _note_followed(state, schema, followed, state.fence)
    if CHOSEN_TYPES in existing:
        properties.setdefault(CHOSEN_TYPES, "{}")
    changed = {
        name: value
        for name, value in properties.items()
        if existing.get(name) != value and (name.startswith(OURS) or name not in existing)
    }
    if changed:
        _set(spark, state.path, changed)


def set_property(spark: SparkSession, path: str, name: str, value: str) -> None:
    """Set one property of a table."""
    _set(spark, path, {name: value})


def _relation_properties(
    state: ScdState, schema: TableSchema, columns: Sequence[TableColumn]
) -> dict[str, str]:
    """Return the properties of a table with this schema, and identify its columns."""
    noted = {c.name: (c.name, c.source, False) for c in columns if c.source and not c.is_noted}
    by_name = {normalize_name(column.name): column for column in columns}
    for field in schema.fields:
        column = by_name.get(normalize_name(field.name))
        is_noted = column is not None and column.is_noted and column.source == field.source
        if field.source is not None and (field.is_retained or (columns and not is_noted)):
            noted[field.name] = field.name, field.source, field.is_retained
    properties = {**table_properties(schema), COLUMNS: columns_text(noted.values())}
    if COMMENTS in properties:
        fields = json.loads(state.schema)["fields"]
        present = [field.get("metadata", {}).get("comment", "") for field in fields]
        properties[COMMENTS] = join_digests(
            properties[COMMENTS], state.properties, [state.description, *present]
        )
    return properties


def _note_followed(
    state: ScdState, schema: TableSchema, followed: FollowedRelation | None, through: int
) -> dict[str, str]:
    """Return the note of the relation that the rows follow, if the schema has another one."""
    wanted = schema.relation.relation_id, schema.version, table_properties(schema)[KEY]
    if followed is None or followed == wanted:
        return {}
    return {FOLLOWED: write_note(state, through, followed._asdict())}


def _features(schema: TableSchema) -> dict[str, str]:
    """Return the table features that Delta does not add to an existing table."""
    types = {field.type.ddl.lower() for field in schema.fields}
    found = {
        feature: "supported"
        for feature, kind in _FEATURES.items()
        if any(kind in ddl for ddl in types)
    }
    if MAPPING in table_properties(schema):
        found[MAPPING] = table_properties(schema)[MAPPING]
    return found


def _set(spark: SparkSession, path: str, properties: dict[str, str]) -> None:
    spark.sql(f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES ({_assignments(properties)})")


def _assignments(properties: dict[str, str]) -> str:
    return ", ".join(f"{string(name)} = {string(value)}" for name, value in properties.items())
