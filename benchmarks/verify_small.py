"""Comparison of nine small tables with their source at one LSN, on a warm Spark server.

Some rows of every table change before and after the comparison point. In one series, the tables are
merged through the comparison point, as by `pgcdc verify`. In the other series, the tables are
merged beyond the comparison point, as by running sensors. No table then has a version of the
comparison point, so the comparison folds all tables.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
from pyspark.sql import SparkSession

from benchmarks.results import Result
from benchmarks.source import log
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeFailure, merge_tables
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.verify import (
    ComparisonFailure,
    compare_tables,
    source_moment,
    wait_captured,
)

TABLES = 9
ROWS = 1_000
CHANGES = 20
REPETITIONS = 3
LIMIT_SECONDS = 1.0

_WARM_UP = 1
_NAME, _SLOT, _PUBLICATION = "bench", "verify_small", "pub"
_TARGETS = [CdcTable("public", f"t{number}") for number in range(TABLES)]


def run() -> Iterator[Result]:
    """Measure the seconds per table, merged through the comparison point and beyond it."""
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-bench-verify-small-"))
    server = EmbeddedServer(folder / "postgres", 18, UNSAFE_BUT_FAST)
    try:
        server.start()
        settings = ConnectionSettings(conninfo=server.conninfo(), name=_NAME)
        zone = RawZone(Lake(str(folder / "lake")), _NAME)
        with SparkServer(folder / "spark").running() as running:
            spark = spark_session("pgcdc benchmark", remote=running.remote)
            bench = _Bench(spark, settings, zone)
            bench.fill()
            through, beyond = [], []
            for number in range(_WARM_UP + REPETITIONS):
                found = bench.seconds(is_beyond=False), bench.seconds(is_beyond=True)
                log(f"merged through the moment {found[0]:.2f} s a table, beyond {found[1]:.2f} s")
                if number >= _WARM_UP:
                    through.append(found[0])
                    beyond.append(found[1])
            spark.stop()
    finally:
        server.remove()
        shutil.rmtree(folder, ignore_errors=True)
    unit = "s a table"
    yield Result.against_limit("verify_nine_small_tables", through, LIMIT_SECONDS, unit)
    yield Result.reported("verify_nine_small_tables_folded", beyond, unit)


class _Bench:
    def __init__(self, spark: SparkSession, settings: ConnectionSettings, zone: RawZone) -> None:
        self._spark = spark
        self._settings = settings
        self._zone = zone

    def fill(self) -> None:
        """Create and merge the tables."""
        for target in _TARGETS:
            self._execute(
                f"create table {target.table} (id int primary key, name text, price numeric(10, 2),"
                " tags text[], changed timestamptz, rate float8)",
                f"insert into {target.table} select i, 'row ' || i, i / 4.0, array['a', 'b ' || i],"
                f" timestamptz '2026-01-01' + i * interval '1 s', i / 7.0 "
                f"from generate_series(1, {ROWS}) i",
            )
        self._execute(f"create publication {_PUBLICATION} for all tables")
        snapshot_tables(self._settings, self._zone, _SLOT, _PUBLICATION)
        self._merge()

    def seconds(self, *, is_beyond: bool) -> float:
        """Compare all tables, and return the seconds per table."""
        self._change()
        with source_moment(self._settings, self._zone, _SLOT) as moment:
            self._change()
            self._merge(None if is_beyond else moment.lsn)
            wait_captured(self._zone, moment, 0)
            began = time.monotonic()
            for found in compare_tables(
                self._spark, self._settings, self._zone, _PUBLICATION, _TARGETS, moment
            ):
                if isinstance(found, ComparisonFailure) or not found.is_equal:
                    raise SystemExit(f"differs: {found}")
            return (time.monotonic() - began) / TABLES

    def _change(self) -> None:
        for target in _TARGETS:
            self._execute(
                f"update {target.table} set price = price + 1 where id % {ROWS // CHANGES} = 0"
            )

    def _merge(self, through: Lsn | None = None) -> None:
        """Capture and merge through an LSN, or through all commits."""
        epoch = self._zone.epochs.latest()
        assert epoch is not None
        self._execute("select pg_logical_emit_message(true, 'bench', '')", "checkpoint")
        with closing(psycopg2.connect(self._settings.conninfo)) as conn, conn.cursor() as cursor:
            cursor.execute("select pg_current_wal_flush_lsn()::text")
            row = cursor.fetchone()
        assert row is not None
        start = self._zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
        window = LsnWindow.of(epoch.epoch, start, through or Lsn.parse(row[0]))
        capture_window(self._settings, self._zone, _SLOT, _PUBLICATION, window)
        for report in merge_tables(self._spark, self._zone, _TARGETS, window):
            if isinstance(report, MergeFailure):
                raise SystemExit(f"not merged: {report.error}")

    def _execute(self, *statements: str) -> None:
        with closing(psycopg2.connect(self._settings.conninfo)) as conn, conn.cursor() as cursor:
            conn.autocommit = True
            for statement in statements:
                cursor.execute(statement)
