"""Session settings that follow the size of one merge.

A merge of a few rows is all planning: writing, compiling and re-planning code for stages that end
in milliseconds takes most of its time. A large one is the opposite. So the same session is told
before each table what kind of merge comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_CHANGES = 20_000
# A table up to this size is read as fast whole as in part.
SMALL_BYTES = 32 * 1024 * 1024

FOR_SMALL = {
    # Without it each stage is planned when the ones before it have ended.
    "spark.sql.adaptive.enabled": "false",
    # Java source is written, formatted and looked up for each stage, and for each projection of
    # each task, even where it was compiled.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
    # Eight jobs of bookkeeping mark rows as deleted; a small file is written anew in one.
    "spark.databricks.delta.merge.deletionVectors.persistent": "false",
}


# What sessions had before they were first told. To unset a setting would bring back Spark's own
# default, and not what the session was made with: 200 partitions instead of a few.
_first: WeakKeyDictionary[SparkSession, dict[str, str | None]] = WeakKeyDictionary()


def tune(spark: SparkSession, change_count: int, target_bytes: int) -> None:
    """Prepare a session, which nobody else uses, for a merge of this size.

    Args:
        target_bytes: of all files of the SCD table.
    """
    if spark not in _first:
        _first[spark] = {name: spark.conf.get(name, None) for name in FOR_SMALL}
    is_small = change_count <= SMALL_CHANGES and target_bytes <= SMALL_BYTES
    for name, value in (FOR_SMALL if is_small else _first[spark]).items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)
