"""Identifiers and literals in Spark SQL.

The merge builds expressions as SQL text: one string costs one call to the JVM, or one message to
the Connect server. The Column functions cost one call per operator.
"""

from __future__ import annotations

import datetime as dt

import pyarrow as pa

# Types of whole numbers, and the bits of their values.
WHOLE_NUMBER_BITS = {"SMALLINT": 16, "INT": 32, "BIGINT": 64}

_ARROW_TYPES = {
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.string(): "STRING",
    pa.large_string(): "STRING",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP",
}


def identifier(name: str) -> str:
    """Return a quoted identifier. The name may contain any character except NUL."""
    return "`" + name.replace("`", "``") + "`"


def string(text: str) -> str:
    """Return a string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def delta_table(path: str) -> str:
    """Return the SQL name of the Delta table at a path."""
    return f"delta.{identifier(path)}"


def timestamp(at: dt.datetime) -> str:
    """Return an expression of a TIMESTAMP with microseconds."""
    return f"timestamp_micros({round(at.timestamp() * 1_000_000)})"


def between_sql(column: str, least: object, most: object, ddl: str) -> str:
    """Write a range, both ends included, with literals of the column's own type."""
    return f"{column} BETWEEN CAST({least} AS {ddl}) AND CAST({most} AS {ddl})"


def comparable_sql(column: str, ddl: str) -> str:
    """Write the SQL by which values of a column are equal if Postgres prints them alike.

    Spark takes 0 and -0 for equal, and Postgres prints them differently. Spark compares neither
    maps nor variants; the entries of our maps are in the order of hstore's text.
    """
    if ddl.startswith("MAP<"):
        return f"map_entries({column})"
    if ddl == "VARIANT":
        return f"to_json({column})"
    return f"CAST({column} AS STRING)" if "FLOAT" in ddl or "DOUBLE" in ddl else column


def schema_ddl(schema: pa.Schema) -> str:
    """Write the columns of an Arrow schema of the raw zone: `op` STRING, `new` ARRAY<STRING> ..."""
    return ", ".join(f"{identifier(field.name)} {_type_ddl(field.type)}" for field in schema)


def _type_ddl(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"ARRAY<{_type_ddl(kind.value_type)}>"
    return _ARROW_TYPES[kind]
