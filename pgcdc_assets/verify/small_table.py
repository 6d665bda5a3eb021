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
# Rows to be cast at a time, before their size in memory is known.
_CAST_ROWS = 256

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
        reader = pa.RecordBatchReader.from_stream(table.scan())
        found = _read_rows(reader, pa.schema(schema.to_arrow()))
    except (DeltaError, pa.ArrowException, OSError):
        # Let Spark read the table or raise the error.
        return None
    return None if found is None else SmallTable(found, schema.to_json())


def _read_rows(reader: pa.RecordBatchReader, schema: pa.Schema) -> pa.Table | None:
    """Read all rows with the types of the table, not those of the engine; None if they are large.

    Parquet keeps equal values once, so the rows of a small file may need far more memory. The cast
    copies them. So few rows at a time are cast, and of large rows very few.
    """
    parts: list[pa.Table] = []
    size, count = 0, 1
    for batch in reader:
        start = 0
        while start < batch.num_rows:
            rows = pa.Table.from_batches([batch.slice(start, count)]).cast(schema)
            size += rows.nbytes
            if size > _SMALL_MEMORY:
                return None
            parts.append(rows)
            start, count = start + count, min(2 * count, _CAST_ROWS)
    return pa.concat_tables(parts).combine_chunks() if parts else schema.empty_table()


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

    # A table of Arrow without a batch has no part from which PySpark could learn a map's type.
    rows = small.rows if small.rows.num_rows else []
    return spark.createDataFrame(rows, StructType.fromJson(json.loads(small.schema)))
