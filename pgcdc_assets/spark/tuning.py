"""Session settings that follow the size of one merge.

A merge of a few rows is all planning: writing, compiling and re-planning code for stages that end
in milliseconds takes most of its time. A large one is the opposite. In between, compiled code pays
and re-planning does not. So the same session is told before each table what kind of merge comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_CHANGES = 20_000
# Few changes of long values are no small merge: one task would hold all of them.
SMALL_CHANGE_BYTES = 32 * 1024 * 1024
# A task of a shuffle is to get so many bytes of changes.
PARTITION_BYTES = 32 * 1024 * 1024
# A table up to this size is read as fast whole as in part.
SMALL_BYTES = 32 * 1024 * 1024

FOR_SMALL = {
    # Without it each stage is planned when the ones before it have ended.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    # Eight jobs of bookkeeping mark rows as deleted; a small file is written anew in one.
    "spark.databricks.delta.merge.deletionVectors.persistent": "false",
    # The state of a table with few files is asked for several times: each time by one task.
    "spark.databricks.delta.snapshotPartitions": "1",
}

TINY_CHANGES = 2_000
TINY_BYTES = 1024 * 1024

FOR_TINY = {
    **FOR_SMALL,
    # Java source is written, formatted and looked up for each stage, and for each projection of
    # each task, even where it was compiled. Without it each row costs more: a table of 100,000
    # rows takes twice the time.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}

_BLOOM = "spark.sql.optimizer.runtime.bloomFilter"
# Ten bits a key let one in a hundred other rows pass. Beyond this many keys there is no filter:
# each task would be sent more than the 42 MB that this many make, once rounded up.
_BITS_PER_KEY = 10
_MOST_KEYS = 20_000_000

# What sessions had before they were first told, and what they were told last. To unset a setting
# would bring back Spark's own default, and not what the session was made with: 200 partitions
# instead of a few.
_first: WeakKeyDictionary[SparkSession, dict[str, str | None]] = WeakKeyDictionary()
_told: WeakKeyDictionary[SparkSession, dict[str, str | None]] = WeakKeyDictionary()

# Of a partitioned table, such as one with history, Delta otherwise sends each partition's rows to
# one task.
_ALL_TASKS_WRITE = {"spark.databricks.delta.merge.repartitionBeforeWrite.enabled": "false"}


def for_large(change_count: int) -> dict[str, str]:
    """Give what a merge into a large table is told."""
    return {
        **_ALL_TASKS_WRITE,
        **_key_filter(change_count),
    }


def _key_filter(change_count: int) -> dict[str, str]:
    """Have rows of the table whose keys are not among the changes' dropped before a shuffle.

    Spark does so only for tables of above 10 GB, and only where it takes the changes for few.
    """
    if not 0 < change_count <= _MOST_KEYS:
        return {f"{_BLOOM}.enabled": "false"}
    # A power of two: Spark compiles source with other constants in it anew.
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
    """Say whether a merge of this size is planning and hardly anything else."""
    return (
        target_bytes <= TINY_BYTES
        and change_count <= TINY_CHANGES
        and change_bytes <= SMALL_CHANGE_BYTES
    )


def _shuffle(change_bytes: int, partitions: str | None) -> dict[str, str]:
    """Give a shuffle as many partitions as the bytes of the changes need.

    Args:
        partitions: what the session was made with.
    """
    needed = -(-change_bytes // PARTITION_BYTES)
    if needed <= int(partitions or 200):
        return {}
    return {"spark.sql.shuffle.partitions": str(needed)}


def tune(spark: SparkSession, change_count: int, target_bytes: int, change_bytes: int = 0) -> None:
    """Prepare a session, which nobody else uses, for a merge of this size.

    Args:
        target_bytes: of all files of the SCD table.
        change_bytes: of the changes as text.
    """
    if spark not in _first:
        names = (*FOR_TINY, *for_large(1))
        _first[spark] = _told[spark] = {name: spark.conf.get(name, None) for name in names}
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
        if value == _told[spark].get(name):
            continue
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)
    _told[spark] = wanted
