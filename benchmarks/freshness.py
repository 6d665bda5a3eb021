"""The age of a change when a reader of the merged table finds it, with all sensors on.

A source commits 1,000 row changes a second (`freshness_source.py`). `dagster dev` runs the lag
sensor and the merge sensor, captures and merges are runs of Dagster, and all settings have their
defaults. Five times a second, a reader looks for a new version of the SCD1 tables by delta-rs. The
age of a marker is the time from its commit to its first read. Source and reader use the same clock.

The benchmark runs three times: one table and a hundred tables with the Spark server of
`pgcdc spark start`, and one table with a Spark session in each run. Each time it uses a new server,
lake and Dagster. The first minute is a warm-up. The measurement is longer than the life of a run.
So it contains the end of each kind of run and the start of the next run.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from benchmarks.freshness_source import (
    CHANGES_PER_SECOND,
    DATABASE,
    MARKERS,
    NAME,
    PUBLICATION,
    TABLES,
    Writer,
    source,
    table_names,
)
from benchmarks.live_pipeline import count_equal_rows, environment_of, running_dagster
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.source import log
from pgcdc_assets.orchestration.project.home import CONFIG
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.tables.state import table_path

_WARM_UP_SECONDS = scaled(60, least=10)
_SECONDS = scaled(round(WindowPolicy.run_seconds) + 30, least=30)
_MANY_TABLES = 100
_LIMIT = 4.0

_POLL_SECONDS = 0.2
_SECONDS_TO_BEGIN = 600.0
_SECONDS_TO_CATCH_UP = 600.0
_NEWS_SECONDS = 30.0
# Minimum share of the requested rate. Below it, the machine was too busy for a result.
_LEAST_RATE = 0.95


def run() -> Iterator[Result]:
    """Measure one table and many tables with the Spark server, then one table without it."""
    with roomy_folder("freshness-connect", 3) as folder:
        ages = _measure(folder)
        yield Result.reported("freshness_connect_p50", ages, "s")
        yield _against_limit("freshness_connect_p95", ages)
        yield Result.reported("freshness_connect_at_most", ages, "s", value=max(ages))
    with roomy_folder("freshness-tables", 3) as folder:
        ages = _measure(folder, tables=_MANY_TABLES)
        yield Result.reported("freshness_100_tables_p50", ages, "s")
        yield _against_limit("freshness_100_tables_p95", ages)
        yield Result.reported("freshness_100_tables_at_most", ages, "s", value=max(ages))
    with roomy_folder("freshness-embedded", 3) as folder:
        ages = _measure(folder, with_server=False)
        yield Result.reported("freshness_embedded_p50", ages, "s")
        yield Result.reported("freshness_embedded_p95", ages, "s", value=_percentile_95(ages))


def _against_limit(name: str, ages: list[float]) -> Result:
    return Result.against_limit(name, ages, _LIMIT, "s", value=_percentile_95(ages))


def _measure(folder: Path, *, tables: int = 1, with_server: bool = True) -> list[float]:
    """Return the ages of the markers after the warm-up."""
    (folder / "dagster").mkdir()
    shutil.copyfile(CONFIG, folder / "dagster" / "dagster.yaml")
    spark = SparkServer(folder / "state").running(log) if with_server else nullcontext()
    with source(folder, tables) as postgres, spark as server:
        conninfo = postgres.conninfo(DATABASE)
        remote = server.remote if server is not None else "local"
        environment = environment_of(conninfo, folder, folder / "dagster", remote)
        environment[TABLES] = str(tables)
        zone = RawZone(Lake(environment["PGCDC_LAKE"]), NAME)
        writer = Writer(conninfo, tables)
        with running_dagster("benchmarks.freshness_definitions", folder, environment) as (_, check):
            reader = Reader(zone, table_names(tables))
            ages = _follow(reader, writer, check)
        rows = count_equal_rows(conninfo, zone, PUBLICATION, table_names(tables))
    # At the end of the writer, each table gets one more marker.
    last = writer.markers - tables
    measured = [age for marker, age in ages.items() if _WARM_UP_SECONDS < marker <= last]
    kind = "server" if with_server else "embedded"
    log(
        f"{kind}, {tables} tables: {len(measured)} markers, {min(measured):.1f} to "
        f"{max(measured):.1f} s, p50 {statistics.median(measured):.1f} s, "
        f"p95 {_percentile_95(measured):.1f} s; "
        f"{rows:,} rows equal their source"
    )
    return measured


def _follow(reader: Reader, writer: Writer, check: Callable[[], None]) -> dict[int, float]:
    """Write and read until every marker is found, and return the age of each marker."""
    _look_until(reader.open_tables, check, _SECONDS_TO_BEGIN, "a first merge", reader)
    log("the snapshot is merged")
    with writer:

        def look() -> None:
            writer.check()
            reader.look(writer.markers)

        def is_over() -> bool:
            look()
            return time.monotonic() >= end

        end = time.monotonic() + _WARM_UP_SECONDS + _SECONDS
        _look_until(is_over, check, float("inf"), "the end", reader)
    writer.check()
    rate = writer.changes / writer.seconds
    log(f"{writer.changes:,} changes were written, {rate:,.0f} a second")
    if rate < CHANGES_PER_SECOND * _LEAST_RATE:
        raise SystemExit(f"only {rate:,.0f} changes a second were written")

    def is_read() -> bool:
        look()
        return len(reader.ages) >= writer.markers

    _look_until(is_read, check, _SECONDS_TO_CATCH_UP, "the last marker", reader)
    return reader.ages


class Reader:
    """Reads the SCD1 tables, version by version.

    A table is read only while it lacks a marker, so the reader costs as much for many tables as
    for one.

    Attributes:
        ages: age of each marker at its first read, by the marker's number.
    """

    def __init__(self, zone: RawZone, names: Sequence[str]) -> None:
        self.ages: dict[int, float] = {}
        self._paths = [table_path(zone.lake, zone.name, "public", name, 1) for name in names]
        self._tables: list[DeltaTable] = []
        self._versions: dict[int, int] = {}
        self._missing: set[int] = set()
        self._expected = 0

    def open_tables(self) -> bool:
        """Open the tables that exist in turn, and return whether all are open."""
        while len(self._tables) < len(self._paths):
            path = self._paths[len(self._tables)]
            if not DeltaTable.is_deltatable(path):
                return False
            self._tables.append(DeltaTable(path))
        return True

    def look(self, markers: int) -> None:
        """Read the missing markers of the tables that have a new version.

        Args:
            markers: the highest number of a committed marker.
        """
        self._missing.update(range(self._expected + 1, markers + 1))
        self._expected = markers
        for number in {marker % len(self._tables) for marker in self._missing}:
            table = self._tables[number]
            table.update_incremental()
            if self._versions.get(number) != table.version():
                self._versions[number] = table.version()
                self._read(number, table)

    def _read(self, number: int, table: DeltaTable) -> None:
        seen_at = time.time()
        oldest = MARKERS + min(self._missing)
        rows = pa.table(
            QueryBuilder()
            .register("orders", table)
            .execute(f"select id, updated_at from orders where id >= {oldest}")
        )
        for row in rows.to_pylist():
            marker = row["id"] - MARKERS
            if marker not in self.ages:
                self.ages[marker] = seen_at - row["updated_at"].timestamp()
                self._missing.discard(marker)


def _look_until(
    is_over: Callable[[], bool],
    check: Callable[[], None],
    limit_seconds: float,
    awaited: str,
    reader: Reader,
) -> None:
    """Look until a condition is true, and print progress."""
    began = news = time.monotonic()
    while not is_over():
        check()
        now = time.monotonic()
        if now - began > limit_seconds:
            raise SystemExit(f"{awaited} did not come within {limit_seconds:g} s")
        if now - news > _NEWS_SECONDS:
            news = now
            log(f"... waiting for {awaited}; {len(reader.ages)} markers seen")
        time.sleep(_POLL_SECONDS)


def _percentile_95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]
