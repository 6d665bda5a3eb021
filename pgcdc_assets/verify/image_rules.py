"""The rule about the rows of an SCD1 table: a key has one row.

After a merge, only the rows that the merge wrote and older rows with the same keys are checked. All
keys of a small table are counted without Spark, whose driver needs longer than the count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.verify.merge_key import MergeKey
from pgcdc_assets.verify.table_version import TableVersion

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_VIEW = "pgcdc_rows"
_OLDER_VIEW = "pgcdc_older_rows"

# The bound of the keys in memory. The log has the compressed size of the rows only.
_MOST_KEY_BYTES = 32 * 1024 * 1024
# Of rows that are decoded at once. A value in a dictionary of a Parquet file has up to 1 MB.
_BATCH_ROWS = 1024


def count_duplicates(
    session: SparkSession, image: DataFrame, key: MergeKey, since: Lsn | None
) -> tuple[int, int]:
    """Count the checked rows, and the keys of checked rows that occur more than once in the table.

    Args:
        session: a session for this call only, with the time zone UTC.
        image: the table's rows.
        since: check the rows at this LSN or above; None: all rows.
    """
    rows = image if since is None else image.where(f"_lsn >= {int(since)}")
    rows.selectExpr(*key.expressions()).createOrReplaceTempView(_VIEW)
    bounds = "".join(f", {bound}" for bound in key.bounds())
    found = session.sql(
        f"SELECT coalesce(sum(n), 0) AS row_count, count_if(n > 1) AS duplicates{bounds} "
        f"FROM (SELECT {key.listed}, count(*) AS n FROM {_VIEW} GROUP BY {key.listed})"
    ).collect()[0]
    row_count, duplicates = found["row_count"], found["duplicates"]
    if since is not None and row_count:
        older = image.where(f"_lsn < {int(since)}").where(key.within(found.asDict()))
        older.selectExpr(*key.expressions()).createOrReplaceTempView(_OLDER_VIEW)
        duplicates += session.sql(
            f"SELECT count(*) AS n FROM {_OLDER_VIEW} o LEFT SEMI JOIN {_VIEW} t "
            f"ON {key.same('o', 't')}"
        ).collect()[0]["n"]
    return row_count, duplicates


def count_small_duplicates(zone: RawZone, pinned: TableVersion) -> tuple[int, int] | None:
    """Count the rows of a small table, and its keys that occur more than once, by pyarrow.

    Returns:
        None if Spark has to count: for keys with NULL, whose text may be in `_rescued`, with types
        for which Arrow's and Spark's equality differ, and for keys that need much memory.
    """
    if pinned.files is None:
        return None
    files = filesystem(zone.lake, pinned.path)
    found: list[pa.Table] = []
    row_count = size = 0
    try:
        for uri in pinned.files:
            with files.open_input_file(uri.removeprefix(f"{pinned.path}/")) as source:
                file = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
                row_count += file.metadata.num_rows
                for batch in file.iter_batches(
                    _BATCH_ROWS, columns=list(pinned.key), use_threads=False
                ):
                    size += batch.nbytes
                    if size > _MOST_KEY_BYTES:
                        return None
                    found.append(pa.Table.from_batches([batch]))
        keys = pa.concat_tables(found, promote_options="permissive") if found else None
    except (OSError, pa.ArrowException):
        # Spark reads the table, or explains what is wrong.
        return None
    if not row_count:
        return 0, 0
    if keys is None or keys.num_rows < row_count:
        # A file lacks the columns of the key.
        return None
    if keys.column_names != list(pinned.key) or not all(map(_is_plain, keys.columns)):
        return None
    counts = keys.group_by(pinned.key, use_threads=False).aggregate([([], "count_all")])
    duplicates = pc.sum(pc.greater(counts.column("count_all"), 1)).as_py() or 0
    return keys.num_rows, duplicates


def _is_plain(column: pa.ChunkedArray) -> bool:
    kind = column.type
    return not (column.null_count or pa.types.is_floating(kind) or pa.types.is_nested(kind))
