"""Session settings by the size of one merge.

In a merge of a few rows, planning and code generation take longer than the stages themselves. In a
large merge, both pay off. In between, code generation pays off and adaptive planning does not. The
settings of the session are therefore changed before the merge of each table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_CHANGES = 20_000
# Few changes with long values are not a small merge: one task would process all bytes.
SMALL_CHANGE_BYTES = 32 * 1024 * 1024
# Target bytes of changes per task of a shuffle.
PARTITION_BYTES = 32 * 1024 * 1024
# Up to this table size, reading the whole table is as fast as reading a part.
SMALL_BYTES = 32 * 1024 * 1024

FOR_SMALL = {
    # Adaptive execution plans each stage after the previous stage has ended.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    # Deletion vectors need eight jobs; rewriting a small file needs one.
    "spark.databricks.delta.merge.deletionVectors.persistent": "false",
    # Delta computes the table's snapshot several times, each time with this number of tasks.
    "spark.databricks.delta.snapshotPartitions": "1",
}

TINY_CHANGES = 2_000
TINY_BYTES = 1024 * 1024

FOR_TINY = {
    **FOR_SMALL,
    # Code generation writes, formats and looks up Java source for each stage and each projection of
    # each task, also for compiled code. Without code generation each row costs more: a merge into a
    # table of 100,000 rows takes twice the time.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}

_BLOOM = "spark.sql.optimizer.runtime.bloomFilter"
# With ten bits a key, one in a hundred non-matching rows passes the Bloom filter. With more keys
# than this, no filter is built: the filter, 42 MB at this size after rounding up, is sent to every
# task.
_BITS_PER_KEY = 10
_MOST_KEYS = 20_000_000

# The settings of sessions before the first and after the last call of `tune`. Unsetting a setting
# would restore Spark's default (200 partitions) instead of the session's initial value.
_first: WeakKeyDictionary[SparkSession, dict[str, str | None]] = WeakKeyDictionary()
_last: WeakKeyDictionary[SparkSession, dict[str, str | None]] = WeakKeyDictionary()

# By default Delta sends all rows of a partition of a partitioned table, such as a table with
# history, to one task.
_ALL_TASKS_WRITE = {"spark.databricks.delta.merge.repartitionBeforeWrite.enabled": "false"}


def for_large(change_count: int) -> dict[str, str]:
    """Return the settings of a merge into a large table."""
    return {
        **_ALL_TASKS_WRITE,
        **_key_filter(change_count),
    }


def _key_filter(change_count: int) -> dict[str, str]:
    """Return the settings of a Bloom filter that drops unchanged rows before a shuffle.

    By default Spark builds a runtime Bloom filter for tables above 10 GB only, and only if it
    estimates that the changes are few.
    """
    if not 0 < change_count <= _MOST_KEYS:
        return {f"{_BLOOM}.enabled": "false"}
    # A power of two, because Spark compiles generated code with another constant again.
    expected = 1 << (change_count - 1).bit_length()
    keys, bits = str(expected), str(_BITS_PER_KEY * expected)
    return {
        f"{_BLOOM}.enabled": "true",
        f"{_BLOOM}.applicationSideScanSizeThreshold": "0",
        f"{_BLOOM}.creationSideThreshold": str(1 << 40),
        f"{_BLOOM}.expectedNumItems": keys,
        f"{_BLOOM}.maxNumItems": keys,
        f"{_BLOOM}.numBits": bits,
        f"{_BLOOM}.maxNumBits": bits,
    }


def is_tiny(change_count: int, target_bytes: int, change_bytes: int = 0) -> bool:
    """Return whether planning takes nearly all time of a merge of this size."""
    return (
        target_bytes <= TINY_BYTES
        and change_count <= TINY_CHANGES
        and change_bytes <= SMALL_CHANGE_BYTES
    )


def _shuffle(change_bytes: int, partitions: str | None) -> dict[str, str]:
    """Return the number of shuffle partitions for the bytes of the changes.

    Args:
        change_bytes: size of the changes as text.
        partitions: the session's initial number of partitions. Databricks accepts `auto`, and
            then chooses the number itself.
    """
    needed = -(-change_bytes // PARTITION_BYTES)
    try:
        if needed <= int(partitions or 200):
            return {}
    except ValueError:
        return {}
    return {"spark.sql.shuffle.partitions": str(needed)}


def tune(spark: SparkSession, change_count: int, target_bytes: int, change_bytes: int = 0) -> None:
    """Set the settings of a session for a merge of this size. No other thread uses the session.

    Args:
        spark: the session.
        change_count: number of changes.
        target_bytes: size of the files of the SCD table whose rows the merge may change.
        change_bytes: size of the changes as text.
    """
    if spark not in _first:
        names = (*FOR_TINY, *for_large(1))
        _first[spark] = _last[spark] = {name: spark.conf.get(name, None) for name in names}
    wanted = dict(_first[spark])
    if target_bytes > SMALL_BYTES:
        wanted |= for_large(change_count)
    elif is_tiny(change_count, target_bytes, change_bytes):
        wanted |= FOR_TINY
    elif change_count <= SMALL_CHANGES and change_bytes <= SMALL_CHANGE_BYTES:
        wanted |= FOR_SMALL
    if change_bytes > SMALL_CHANGE_BYTES:
        wanted |= _ALL_TASKS_WRITE
    wanted |= _shuffle(change_bytes, wanted["spark.sql.shuffle.partitions"])
    for name, value in wanted.items():
        if value == _last[spark].get(name):
            continue
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)
    _last[spark] = wanted
