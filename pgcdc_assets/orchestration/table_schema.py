"""What an SCD table looks like, read by delta-rs: no JVM is needed to describe it."""

from __future__ import annotations

from typing import Any

import dagster as dg
from deltalake import DeltaTable

from pgcdc_assets.raw.lake import Lake

# As Spark SQL writes them, and the UI knows them.
_SQL_NAMES = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}


def open_table(lake: Lake, path: str) -> DeltaTable:
    """Open a table of the lake."""
    return DeltaTable(path, storage_options=dict(lake.storage_options) or None)


def read_columns(lake: Lake, path: str) -> list[dg.TableColumn]:
    """Describe the columns; a column's comment is its Postgres type."""
    fields: list[Any] = open_table(lake, path).schema().fields
    return [
        dg.TableColumn(
            name=field.name,
            type=_type_name(field.type),
            description=field.metadata.get("comment"),
            constraints=dg.TableColumnConstraints(nullable=field.nullable),
        )
        for field in fields
    ]


def _type_name(kind: Any) -> str:
    name = getattr(kind, "type", None)
    if name == "array":
        return f"array<{_type_name(kind.element_type)}>"
    if name == "map":
        return f"map<{_type_name(kind.key_type)},{_type_name(kind.value_type)}>"
    return _SQL_NAMES.get(str(name or kind), str(name or kind))
