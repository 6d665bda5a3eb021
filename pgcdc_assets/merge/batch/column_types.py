"""The Arrow types of the Delta types that small tables are written with in this process."""

from __future__ import annotations

import re
from functools import cache

import pyarrow as pa

from pgcdc_assets.merge.fold.table_schema import TableSchema

_TYPES = {
    "BOOLEAN": pa.bool_(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
    "MAP<STRING, STRING>": pa.map_(pa.string(), pa.string()),
}
_DECIMAL = re.compile(r"DECIMAL\((\d+),\s*(\d+)\)")
_ARRAY = re.compile(r"ARRAY<(.*)>")


@cache
def find_arrow_type(ddl: str) -> pa.DataType | None:
    """Return the Arrow type of a Delta type; None for a type that only Spark writes."""
    if (number := _DECIMAL.fullmatch(ddl)) is not None:
        return pa.decimal128(int(number[1]), int(number[2]))
    if (array := _ARRAY.fullmatch(ddl)) is not None:
        element = find_arrow_type(array[1])
        return None if element is None else pa.list_(pa.field("element", element))
    return _TYPES.get(ddl)


def arrow_type(ddl: str) -> pa.DataType:
    """Return the Arrow type of a Delta type that this process writes."""
    found = find_arrow_type(ddl)
    assert found is not None
    return found


def arrow_schema(schema: TableSchema) -> pa.Schema:
    """Return the columns of a table: those of the source, and the system columns."""
    columns = [(field.name, arrow_type(field.type.ddl)) for field in schema.fields]
    return pa.schema([*columns, *((name, arrow_type(ddl)) for name, ddl, _ in schema.system)])
