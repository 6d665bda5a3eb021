"""The settings of Spark: of every session that merges, of an embedded one, of a server of our own.

Nothing here imports PySpark: who starts a server as a process needs the settings only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

DELTA_PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"

# What the written values depend on.
SESSION_CONF: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    # An index beyond a tuple's end is an error and never a quiet NULL; casts that may fail say
    # try_cast.
    "spark.sql.ansi.enabled": "true",
    # The default INT96 has nanoseconds: readers that follow it overflow outside the years 1677 to
    # 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.databricks.delta.schema.autoMerge.enabled": "false",
    # A MERGE reads the files in which a changed row may lie as a whole, for the keys in them.
    "spark.sql.files.maxRecordsPerFile": "1000000",
    # A table with history has two partitions: each task writes both side by side, and need not sort
    # all rows by the partition first, which would undo their order by key.
    "spark.sql.maxConcurrentOutputFileWriters": "2",
}

_EMBEDDED_CONF: Mapping[str, str] = {
    "spark.jars.packages": DELTA_PACKAGE,
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # One row of 200 MB takes 3 GB on its way through a merge.
    "spark.driver.memory": "4g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # A merge has some hundred generated classes, and the default cache holds a hundred: each merge
    # would compile them anew, and run them cold.
    "spark.sql.codegen.cache.maxEntries": "1000",
    # The default of 50 tasks to replay a table's log costs seconds on one machine.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
}

_SERVER_CONF: Mapping[str, str] = {
    # Nobody else's machine reaches any of its ports.
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.catalogImplementation": "in-memory",
    # What is kept of past work for a UI that does not run: by default the plans of a thousand
    # queries, which a process that merges for weeks has no use for.
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "5",
}


def embedded_conf() -> dict[str, str]:
    """The settings of a session that runs in this process, for whoever builds it elsewhere."""
    cores = os.cpu_count() or 2
    return {
        **_EMBEDDED_CONF,
        **SESSION_CONF,
        "spark.master": f"local[{cores}]",
        "spark.sql.shuffle.partitions": str(max(4, 2 * cores)),
    }


def server_conf(port: int, folder: str) -> dict[str, str]:
    """The settings of a Spark Connect server on this machine: an embedded session's, and its own.

    Args:
        folder: where it keeps temporary files.
    """
    return {
        **embedded_conf(),
        **_SERVER_CONF,
        "spark.connect.grpc.binding.port": str(port),
        "spark.local.dir": f"{folder}/tmp",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
    }
