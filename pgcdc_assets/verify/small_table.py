"""Versions of small tables, read and copied by delta-rs, because Spark needs seconds per table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from pgcdc_assets.raw.lake import Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Limit of the bytes of one message to Spark.
_SMALL_BYTES = 2 << 20
SMALL_ROWS = 20_000
_SMALL_MEMORY = 16 << 20

# Prefixes of the table properties that a merge reads.
_MERGE_PROPERTIES = ("pgcdc.", "delta.enableDeletionVectors", "delta.dataSkippingNumIndexedCols")


@dataclass(frozen=True)
class SmallTable:
    """The rows of one version.

    Attributes:
        schema: the schema in the JSON of Delta's log, which Spark reads.
    """

    rows: pa.Table
    schema: str


def row_limit(table: DeltaTable) -> int | None:
    """Return an upper bound of a version's rows; None if the log does not have the counts."""
    counts = pa.table(table.get_add_actions(flatten=True)).column("num_records")
    return None if counts.null_count else int(pc.sum(counts).as_py() or 0)


def read_small(table: DeltaTable) -> SmallTable | None:
    """Read all rows of a version; None if the table is large, or delta-rs cannot read the table."""
    files = pa.table(table.get_add_actions(flatten=True))
    rows = row_limit(table)
    size = int(pc.sum(files.column("size_bytes")).as_py() or 0)
    if rows is None or rows > SMALL_ROWS or size > _SMALL_BYTES:
        return None
    schema = table.schema()
    if '"variant"' in schema.to_json():
        # Arrow has no VARIANT, and Spark does not build a VARIANT from its bytes.
        return None
    try:
        found = pa.RecordBatchReader.from_stream(table.scan()).read_all()
        # Use the types of the table, not those of the engine.
        found = found.cast(pa.schema(schema.to_arrow()))
    except (DeltaError, pa.ArrowException, OSError):
        # Let Spark read the table or raise the error.
        return None
    if not found.num_rows:
        # PySpark cannot read a nested column without chunks.
        found = found.schema.empty_table()
    return SmallTable(found, schema.to_json()) if found.nbytes <= _SMALL_MEMORY else None


def copy_small(lake: Lake, table: DeltaTable, path: str) -> bool:
    """Copy a version of a small table to another folder; return whether the table is small.

    The copy has the parts of a table that the merge reads: rows, columns and key.
    """
    metadata = table.metadata()
    is_mapped = "delta.columnMapping.mode" in metadata.configuration
    small = None if is_mapped else read_small(table)
    if small is None:
        return False
    made = DeltaTable.create(
        path,
        table.schema(),
        partition_by=metadata.partition_columns,
        configuration={
            name: value
            for name, value in metadata.configuration.items()
            if name.startswith(_MERGE_PROPERTIES)
        },
        storage_options=lake.delta_options,
        raise_if_key_not_exists=False,
    )
    write_deltalake(made, small.rows, mode="append")
    return True


def local_rows(spark: SparkSession, small: SmallTable) -> DataFrame:
    """Send rows to Spark, with the types of the table's log."""
    from pyspark.sql.types import StructType

    return spark.createDataFrame(small.rows, StructType.fromJson(json.loads(small.schema)))
