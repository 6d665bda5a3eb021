"""Typed columns from texts: `value_0`, `value_1` ... and `rescued`.

Columns are numbered until they are written, because a source column may have any name.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.raw.table_ends import TableEnd
from pgcdc_assets.spark.sql import string


@dataclass(frozen=True)
class SnapshotRows:
    """The rows of a snapshot.

    Attributes:
        frame: column `new`, in the layout of `schema`.
        lsn: the LSN of the snapshot.
        at: the time of the snapshot.
        key: the snapshot's position as text.
        end: where the rows of the table before end, if the snapshot is one of another table.
    """

    frame: DataFrame
    schema: TableSchema
    lsn: Lsn
    at: dt.datetime
    key: str
    end: TableEnd | None = None

    @property
    def rows_end(self) -> TableEnd:
        """Where the rows end that the snapshot does not have."""
        return TableEnd(self.lsn, self.at) if self.end is None else self.end


def type_columns(
    frame: DataFrame, schema: TableSchema, text: Callable[[int], str], keep: Sequence[str]
) -> DataFrame:
    """Cast texts to typed columns.

    Args:
        text: returns the SQL of a field's text over the frame's columns.
        keep: additional select expressions over the frame's columns.
    """
    width = range(len(schema.fields))
    texts = frame.selectExpr(*(f"{text(i)} AS text_{i}" for i in width), *keep)
    kept = [name for name in texts.columns if not re.fullmatch(r"text_\d+", name)]
    values = texts.selectExpr(
        *(f"text_{i} AS text_{i}" for i in width),
        *(f"{schema.fields[i].type.expression(f'text_{i}')} AS value_{i}" for i in width),
        *kept,
    )
    return values.selectExpr(
        *(f"value_{i}" for i in width), f"{_rescued(schema)} AS rescued", *kept
    )


def _rescued(schema: TableSchema) -> str:
    """Write the SQL of the map of texts without a typed value; NULL when every value is typed."""
    lost = {
        i: f"(text_{i} IS NOT NULL AND value_{i} IS NULL)"
        for i, field in enumerate(schema.fields)
        if not field.type.is_text
    }
    if not lost:
        return "CAST(NULL AS MAP<STRING, STRING>)"
    entries = ", ".join(
        f"IF({condition}, struct({string(schema.fields[i].name)} AS key, text_{i} AS value), NULL)"
        for i, condition in lost.items()
    )
    return (
        f"IF({' OR '.join(lost.values())}, map_from_entries(array_compact(array({entries}))), NULL)"
    )


def type_snapshot_rows(copied: DataFrame, schema: TableSchema, lsn: Lsn) -> DataFrame:
    """Return the rows of a snapshot with typed columns and the position of the snapshot.

    Args:
        copied: column `new`, in the layout of `schema`.
        lsn: the LSN of the snapshot.
    """
    keep = [
        f"CAST({int(lsn)} AS BIGINT) AS lsn",
        "CAST(-1 AS BIGINT) AS ordinal",
        "CAST(NULL AS TIMESTAMP) AS commit_ts",
        "false AS deleted",
        "CAST(NULL AS BIGINT) AS deleted_at_lsn",
    ]
    return type_columns(copied, schema, schema.copied_text, keep)
