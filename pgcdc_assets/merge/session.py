"""Spark sessions: how one is started, and what every merge needs of one.

The same code runs in an embedded session and against a Spark Connect server, so nothing here or in
the other modules of `merge` reaches for the JVM. Settings that decide what is written (time zone,
timestamp type, ANSI) are set on the session that merges and not left to whoever started it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pyspark.sql import SparkSession

DELTA_PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"

# What the written values depend on.
_SESSION_CONF = {
    "spark.sql.session.timeZone": "UTC",
    # An index beyond a tuple's end is an error and never a quiet NULL; casts that may fail say
    # try_cast.
    "spark.sql.ansi.enabled": "true",
    # The default INT96 has nanoseconds: readers that follow it overflow outside the years 1677 to
    # 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.databricks.delta.schema.autoMerge.enabled": "false",
}

_EMBEDDED_CONF = {
    "spark.jars.packages": DELTA_PACKAGE,
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.driver.memory": "2g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # The default of 50 tasks to replay a table's log costs seconds on one machine.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
}


def embedded_conf() -> dict[str, str]:
    """The settings of a session that runs in this process, for whoever builds it elsewhere."""
    cores = os.cpu_count() or 2
    return {
        **_EMBEDDED_CONF,
        **_SESSION_CONF,
        "spark.master": f"local[{cores}]",
        "spark.sql.shuffle.partitions": str(max(4, 2 * cores)),
    }


def spark_session(
    app_name: str, *, remote: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Start or reuse a session.

    Args:
        remote: address of a Spark Connect server (`sc://host:port`); None starts an embedded
            session.
        conf: settings that come on top of ours.
    """
    builder = SparkSession.builder.appName(app_name)
    settings = {**(_SESSION_CONF if remote else embedded_conf()), **(conf or {})}
    if remote:
        builder = builder.remote(remote)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def own_session(spark: SparkSession) -> SparkSession:
    """Open a session beside the given one, with settings and temporary views of its own.

    Delta takes a MERGE's application transaction from the session's settings, so tables that are
    merged side by side must not share a session.
    """
    session: SparkSession = (
        spark.cloneSession() if hasattr(spark, "cloneSession") else spark.newSession()
    )
    for key, value in _SESSION_CONF.items():
        session.conf.set(key, value)
    return session
