"""Rows that the columns of a new key do not identify.

A source table may get another key. The rows of its history were written under the earlier key. In
the columns of the new key, a row may have NULL, or several rows may have the same value. Such rows
cannot be compared with the snapshot, so they end, and the snapshot's rows begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import DataFrame

from pgcdc_assets.merge.column_changes import find_column_changes
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.opened_table import stored_key
from pgcdc_assets.spark.sql import identifier, string
from pgcdc_assets.tables.source_columns import TableColumn
from pgcdc_assets.tables.state import ScdState


class KeyValue(NamedTuple):
    """SQL of the value of a key column, its text if the type cannot hold it, and of both."""

    name: str
    value: str
    text: str

    @property
    def sql(self) -> str:
        """Both parts."""
        return f"{self.value}, {self.text}"

    @property
    def is_null(self) -> str:
        """Whether there is neither."""
        return f"({self.value} IS NULL AND {self.text} IS NULL)"


def key_values(names: Sequence[str], alias: str = "") -> list[KeyValue]:
    """Write the SQL of the values of some columns of a table.

    Args:
        alias: of the table, with a dot; empty for unqualified columns.
    """
    return [
        KeyValue(
            name,
            f"{alias}{identifier(name)}",
            f"try_element_at({alias}_rescued, {string(name)})",
        )
        for name in names
    ]


def find_new_key(
    state: ScdState, columns: Sequence[TableColumn], schema: TableSchema
) -> list[str | None] | None:
    """Return the present names in a table of the columns of a new key; None for the same key.

    A column that the table does not have is None.

    Args:
        columns: of the table.
    """
    changes = find_column_changes(columns, schema)
    present = {field.name: name for name, field in changes.fields.items()}
    key = [present.get(name) for name in schema.key_names]
    return None if set(key) == set(stored_key(state)) else key


def rows_without_key(rows: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the values of a new key that are NULL, or that several rows have.

    Args:
        names: of the key's columns.
    """
    values = key_values(names)
    keys = rows.selectExpr(
        *(f"{each.value} AS value_{number}" for number, each in enumerate(values)),
        *(f"{each.text} AS text_{number}" for number, each in enumerate(values)),
    )
    is_null = " OR ".join(
        f"(value_{number} IS NULL AND text_{number} IS NULL)" for number in range(len(values))
    )
    counted = keys.groupBy(*keys.columns).count()
    return counted.where(f"`count` > 1 OR {is_null}").select(*keys.columns)


def same_value_sql(names: Sequence[str]) -> str:
    """Write the SQL that a row `t` of the table has a value `s` of `rows_without_key`."""
    return " AND ".join(
        f"{each.value} <=> s.value_{number} AND {each.text} <=> s.text_{number}"
        for number, each in enumerate(key_values(names, "t."))
    )
