"""Comparison of a table with its source at one LSN: rows per second, and memory growth.

The orders of the capture benchmark get a snapshot and are merged. Then one of a hundred orders is
changed and not merged, so that the comparison folds changes. A table with ten times the rows shows
the growth of memory: `verify_memory_growth` is the peak of this process and its JVM with the large
table, divided by the peak with the small table.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import psycopg2
from pyspark.sql import SparkSession

from benchmarks import workload
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
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify import Comparison, compare_at, source_moment, wait_captured

SMALL_ROWS, LARGE_ROWS = 200_000, 2_000_000
REPETITIONS = 3

_NAME, _SLOT, _DATABASE = "bench", "verify", "bench"
_ORDERS = CdcTable("public", "orders")
_PLANTED = 100


def run() -> Iterator[Result]:
    """Measure a small and a large table, equal and with planted differences."""
    spark = spark_session("pgcdc benchmark")
    try:
        small = _measure(spark, SMALL_ROWS)
        large = _measure(spark, LARGE_ROWS)
    finally:
        spark.stop()
    yield Result.reported("verify_equal", [LARGE_ROWS / s for s in large.equal], "rows/s")
    yield Result.reported("verify_planted", [LARGE_ROWS / s for s in large.planted], "rows/s")
    yield Result.of("verify_memory_growth", [large.peak_mb], [small.peak_mb], "MB")


class _Measured:
    def __init__(self) -> None:
        self.equal: list[float] = []
        self.planted: list[float] = []
        self.peak_mb = 0.0


def _measure(spark: SparkSession, rows: int) -> _Measured:
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-bench-verify-"))
    server = EmbeddedServer(folder / "postgres", 18, {**UNSAFE_BUT_FAST, "max_wal_size": "8GB"})
    measured = _Measured()
    try:
        server.start()
        with closing(psycopg2.connect(server.conninfo())) as conn, conn.cursor() as cursor:
            conn.autocommit = True
            cursor.execute(f"create database {_DATABASE}")
        settings = ConnectionSettings(conninfo=server.conninfo(_DATABASE), name=_NAME)
        zone = RawZone(Lake(str(folder / "lake")), _NAME)
        path = _fill(spark, settings, zone, rows)
        with _peak_memory(measured):
            for _ in range(REPETITIONS):
                seconds, found = _verify(spark, settings, zone)
                if not found.is_equal:
                    raise SystemExit(f"differs: {found}")
                measured.equal.append(seconds)
            spark.sql(
                f"UPDATE {delta_table(path)} SET status = 'wrong' WHERE id % {rows // _PLANTED} = 3"
            )
            for _ in range(REPETITIONS):
                seconds, found = _verify(spark, settings, zone)
                if found.differing != _PLANTED or found.columns != ("status",):
                    raise SystemExit(f"the planted rows were not found: {found}")
                measured.planted.append(seconds)
        log(
            f"{rows:,} rows: equal {min(measured.equal):.1f} s, planted "
            f"{min(measured.planted):.1f} s, peak {measured.peak_mb:,.0f} MB"
        )
        return measured
    finally:
        server.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _fill(spark: SparkSession, settings: ConnectionSettings, zone: RawZone, rows: int) -> str:
    """Create and merge the orders, capture some changes, and return the table's path."""
    with closing(psycopg2.connect(settings.conninfo)) as conn, conn.cursor() as cursor:
        conn.autocommit = True
        workload.create_tables(conn)
        workload.insert_orders(conn, 1, rows)
        snapshot_tables(
            settings, zone, _SLOT, workload.PUBLICATION, [TableName("public", "orders")]
        )
        cursor.execute("update customers set vip = vip")
        _capture(settings, zone)
        (report,) = merge_tables(spark, zone, [_ORDERS], _through(zone))
        if isinstance(report, MergeFailure):
            raise SystemExit(f"not merged: {report.error}")
        cursor.execute("update orders set status = 'late', note = null where id % 100 = 0")
        cursor.execute("analyze orders")
    return report.path


def _through(zone: RawZone) -> LsnWindow:
    return zone.changes.windows(1)[-1].window


def _capture(settings: ConnectionSettings, zone: RawZone) -> None:
    epoch = zone.epochs.latest()
    assert epoch is not None
    with closing(psycopg2.connect(settings.conninfo)) as conn, conn.cursor() as cursor:
        conn.autocommit = True
        cursor.execute("select pg_logical_emit_message(true, 'bench', '')")
        cursor.execute("checkpoint")
        cursor.execute("select pg_current_wal_flush_lsn()::text")
        row = cursor.fetchone()
    assert row is not None
    start = zone.changes.captured_through(1) or epoch.start_lsn
    window = LsnWindow.of(1, start, Lsn.parse(row[0]))
    capture_window(settings, zone, _SLOT, workload.PUBLICATION, window)


def _verify(
    spark: SparkSession, settings: ConnectionSettings, zone: RawZone
) -> tuple[float, Comparison]:
    with source_moment(settings, zone, _SLOT) as moment:
        _capture(settings, zone)
        wait_captured(zone, moment, 0)
        began = time.monotonic()
        found = compare_at(spark, settings, zone, workload.PUBLICATION, _ORDERS, moment)
        return time.monotonic() - began, found


@contextmanager
def _peak_memory(measured: _Measured) -> Iterator[None]:
    """Record the highest resident size of this process and its JVM."""
    stop = threading.Event()

    def watch() -> None:
        me = psutil.Process()
        while not stop.wait(0.2):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    if process.name() != "postgres":
                        total += process.memory_info().rss
                except psutil.Error:
                    continue
            measured.peak_mb = max(measured.peak_mb, total / 2**20)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
