"""Spark settings of merging sessions, of embedded sessions and of the local server.

This module does not import PySpark, because the process that starts a server needs the settings
only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pgcdc_assets.spark.class_archive import with_archive
from pgcdc_assets.spark.jars import MASTER, PACKAGES, is_one_machine, with_known_jars

# Spark's setting of the session's own catalog: `hive`, or Spark's default.
CATALOG, IN_MEMORY, HIVE = "spark.sql.catalogImplementation", "in-memory", "hive"

DELTA_PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"
_ANY_DELTA = "io.delta:delta-spark"

# Settings that determine written values and files.
SESSION_CONF: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    # With ANSI mode, an array index out of range is an error instead of NULL. Casts that may fail
    # use try_cast.
    "spark.sql.ansi.enabled": "true",
    # In names and literals of SQL, a text such as `${env:HOME}` would become the variable's value.
    "spark.sql.variable.substitute": "false",
    # The default type INT96 has nanoseconds: some readers overflow outside the years 1677 to 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.databricks.delta.schema.autoMerge.enabled": "false",
    # A MERGE reads every file that may contain a changed row, so a file has a bounded size.
    "spark.sql.files.maxRecordsPerFile": "1000000",
    # A table with history has two partitions. With two open writers, a task writes both partitions
    # without a sort by partition, which would destroy the order by key.
    "spark.sql.maxConcurrentOutputFileWriters": "2",
}

_EMBEDDED_CONF: Mapping[str, str] = {
    PACKAGES: DELTA_PACKAGE,
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # A merge of one row of 200 MB needs 3 GB.
    "spark.driver.memory": "4g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # A merge has about a hundred generated classes. The default cache of a hundred classes would
    # make each merge compile the classes again.
    "spark.sql.codegen.cache.maxEntries": "1000",
}

# Settings for the cores of one machine. On a cluster Spark's own defaults hold, and adaptive
# execution joins small partitions.
_ONE_MACHINE_CONF: Mapping[str, str] = {
    # By default, 50 tasks replay a table's log, which takes seconds on one machine.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
}

# The second compiler (C2) makes fast code slowly: by default it takes a third of the processor time
# of a session's first minute, for code of which little runs long. With ten times the thresholds C2
# compiles only what a large merge repeats. A large merge takes the same time.
_COMPILER_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=50000 "
    "-XX:Tier4MinInvocationThreshold=10000 -XX:Tier4CompileThreshold=150000 "
    "-XX:Tier4BackEdgeThreshold=400000"
)
# With few cores, the threads of the default collector compete with the merge.
_FEW_CORES = 2

_SERVER_CONF: Mapping[str, str] = {
    # No port of the server is reachable from other machines. The driver binds to its host, which a
    # user sets for the executors of a cluster.
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    CATALOG: IN_MEMORY,
    # Spark keeps the plans of a thousand past queries for the UI, which is disabled. A server that
    # runs for weeks does not need the plans.
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "5",
}


def embedded_conf(master: str | None = None) -> dict[str, str]:
    """Return the settings of an embedded session.

    Args:
        master: the address of a cluster's master, or `local[n]`; None: all cores of this machine.
    """
    cores = os.cpu_count() or 2
    conf = {
        **_EMBEDDED_CONF,
        **SESSION_CONF,
        MASTER: master or f"local[{cores}]",
        "spark.driver.extraJavaOptions": _COMPILER_OPTIONS
        + (" -XX:+UseSerialGC" if cores <= _FEW_CORES else ""),
    }
    if is_one_machine(conf[MASTER]):
        partitions = {"spark.sql.shuffle.partitions": str(max(4, 2 * cores))}
        return {**conf, **_ONE_MACHINE_CONF, **partitions}
    return conf


def server_conf(port: int, folder: str, master: str | None = None) -> dict[str, str]:
    """Return the settings of a local Spark Connect server.

    Args:
        port: TCP port on 127.0.0.1.
        folder: folder for temporary files.
        master: as of `embedded_conf`.
    """
    return {
        **embedded_conf(master),
        **_SERVER_CONF,
        "spark.connect.grpc.binding.port": str(port),
        "spark.local.dir": f"{folder}/tmp",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
    }


def with_user_conf(conf: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return settings of a session with the settings of the user over them.

    The user's packages are added to Delta's, unless they contain a Delta. No session works without.
    """
    packages = own.get(PACKAGES, "")
    if not packages or _ANY_DELTA in packages or PACKAGES not in conf:
        return {**conf, **own}
    return {**conf, **own, PACKAGES: f"{conf[PACKAGES]},{packages}"}


def start_conf(conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with which a JVM starts sooner: known jars, and an archive of classes."""
    return with_archive(with_known_jars(conf))
