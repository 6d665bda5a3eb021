"""OPTIMIZE of an SCD table: many small files become few.

Each merge by Spark adds small files, and the next merge reads all files whose keys overlap with its
changes. With a merge every few seconds, a table would have ten thousand files before its daily
maintenance. So a merge that leaves many small files compacts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.session_settings import session_settings
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.deleted_rows import deleted_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Delta's default of 1 GB would mix recent and old rows in one file, and a merge reads the keys of
# every file that may contain a changed row.
FILE_BYTES = 128 * 1024 * 1024
# Files below this size are compacted after a merge if one partition has so many of them. A higher
# size means more bytes for merges to write, a lower one more files for the daily maintenance.
SMALL_FILE_BYTES = 16 * 1024 * 1024
MOST_SMALL_FILES = 64

# The numbers of small files at which tables are compacted whose last OPTIMIZE was of no use.
_WAITING: dict[str, int] = {}

_OPTIMIZE = "spark.databricks.delta.optimize."
_PARTITION = "partition."
# The feature of a table whose OPTIMIZE orders rows by the columns of its owner.
_CLUSTERING = "clustering"


def has_many_small_files(files: pa.Table, further: int = 0) -> bool:
    """Return whether a merge should compact the table.

    Args:
        files: the add actions from delta-rs, flattened.
        further: files beyond the usual limit.
    """
    return _most_files(files, SMALL_FILE_BYTES) >= MOST_SMALL_FILES + further


def needs_compaction(path: str, files: pa.Table) -> bool:
    """Return whether a table to which each merge adds a file has to be compacted now.

    The limits of tables differ. Tables that are merged together reach theirs at different merges,
    and no merge has to compact all of them.
    """
    return has_many_small_files(files, crc32(path.encode()) % MOST_SMALL_FILES)


def needs_optimize(lake: Lake, path: str, table: DeltaTable) -> bool:
    """Return whether an OPTIMIZE could change the table."""
    files = pa.table(table.get_add_actions(flatten=True))
    return (
        _most_files(files, FILE_BYTES) > 1
        # OPTIMIZE rewrites a file of which many rows are deleted.
        or bool(deleted_rows(lake, path, table, files))
        or _CLUSTERING in (table.protocol().writer_features or ())
    )


def _most_files(files: pa.Table, below_bytes: int) -> int:
    """Return the number of files below a size in the partition that has most."""
    small = files.filter(pc.less(files.column("size_bytes"), below_bytes))
    if small.num_rows == 0:
        return 0
    partitioned_by = [name for name in small.column_names if name.startswith(_PARTITION)]
    counts = small.group_by(partitioned_by).aggregate([([], "count_all")])
    return int(pc.max(counts.column("count_all")).as_py())


def compact_small_files(session: SparkSession, path: str, files: pa.Table) -> None:
    """Compact the small files of a table if there are many; another commit is not awaited.

    An OPTIMIZE that fails changes nothing, and the daily maintenance reports a failure. Merges of
    this process try again when the table has a quarter more small files: each attempt reads and
    writes all of them. So do merges after an OPTIMIZE that leaves as many files as before.

    Args:
        session: a session that no other thread uses at the same time.
        files: the add actions from delta-rs, flattened.
    """
    count = _most_files(files, SMALL_FILE_BYTES)
    if count < MOST_SMALL_FILES:
        _WAITING.pop(path, None)
    if count < max(MOST_SMALL_FILES, _WAITING.get(path, 0)):
        return
    _WAITING[path] = count + MOST_SMALL_FILES // 4
    with suppress(Exception):
        # Large files stay, also if a part of their rows is deleted.
        settings = {f"{_OPTIMIZE}maxDeletedRowsRatio": "1.0"}
        removed, added = optimize(session, path, SMALL_FILE_BYTES, settings)
        if removed > added:
            del _WAITING[path]


def optimize(
    session: SparkSession,
    path: str,
    below_bytes: int = FILE_BYTES,
    settings: Mapping[str, str] | None = None,
) -> tuple[int, int]:
    """Compact the files below a size; return the numbers of files before and after.

    Args:
        session: a session that no other thread uses at the same time.
        settings: further settings of Spark for the OPTIMIZE.
    """
    given = {
        f"{_OPTIMIZE}minFileSize": str(below_bytes),
        f"{_OPTIMIZE}maxFileSize": str(FILE_BYTES),
        # Otherwise this OPTIMIZE would split files that the next one compacts again.
        "spark.sql.files.maxRecordsPerFile": "0",
        **(settings or {}),
    }
    with session_settings(session, given):
        metrics = session.sql(f"OPTIMIZE {delta_table(path)}").collect()[0]["metrics"]
    return int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"])
