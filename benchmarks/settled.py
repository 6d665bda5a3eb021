"""The daily maintenance of small tables in which it has nothing to do.

The package looks whether a file is to be compacted or deleted, and asks Spark only then. The
baseline are the statements that the maintenance would be otherwise, OPTIMIZE and VACUUM of each
table. Both run over the same tables, in turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import SparkSession

from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import timed
from benchmarks.source import log
from benchmarks.turns import in_turns
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.session import own_sessions, spark_session
from pgcdc_assets.spark.session_settings import session_settings
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.maintenance import maintain_table

TABLES = scaled(6, least=2)
ROWS = 5_000
REPETITIONS = 3
KEEP_HOURS = 24
_VERSIONS = 5


def run() -> Iterator[Result]:
    """Measure both ways."""
    spark = spark_session("pgcdc benchmark")
    ours: list[float] = []
    by_spark: list[float] = []
    try:
        with roomy_folder("settled", 1) as folder:
            lake = Lake(str(folder))
            paths = [str(folder / f"table_{number}") for number in range(TABLES)]
            for path in paths:
                _write(spark, path)
                # The first maintenance sets the properties of the table.
                maintain_table(lambda: spark, lake, path, KEEP_HOURS)
            log(f"{TABLES} tables of {ROWS:,} rows written")
            for number in range(1 + REPETITIONS):
                sides = {
                    "ours": lambda: timed(lambda: _maintain(lake, paths)),
                    "spark": lambda: timed(lambda: _optimize_and_vacuum(spark, paths)),
                }
                taken = in_turns(sides, number)
                log(", ".join(f"{name} {seconds:.2f} s" for name, seconds in taken.items()))
                if number:
                    ours.append(taken["ours"])
                    by_spark.append(taken["spark"])
    finally:
        spark.stop()
    yield Result.of(f"maintenance_of_{TABLES}_settled_tables_vs_spark", ours, by_spark, "s")


def _write(spark: SparkSession, path: str) -> None:
    for version in range(_VERSIONS):
        rows = spark.range(ROWS).selectExpr("id", f"{version} AS version", "uuid() AS text")
        rows.coalesce(1).write.format("delta").mode("overwrite").save(path)


def _maintain(lake: Lake, paths: list[str]) -> None:
    def session() -> SparkSession:
        raise SystemExit("A settled table needs no Spark.")

    for path in paths:
        maintain_table(session, lake, path, KEEP_HOURS)


def _optimize_and_vacuum(spark: SparkSession, paths: list[str]) -> None:
    delta = "spark.databricks.delta"
    settings = {
        f"{delta}.vacuum.retentionWindowIgnore.enabled": "false",
        f"{delta}.retentionDurationCheck.enabled": "false",
    }
    with own_sessions(spark, 1) as (opened,), session_settings(opened, settings):
        for path in paths:
            opened.sql(f"OPTIMIZE {delta_table(path)}").collect()
            opened.sql(f"VACUUM {delta_table(path)} RETAIN {KEEP_HOURS} HOURS").collect()
