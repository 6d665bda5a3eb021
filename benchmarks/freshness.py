"""The age of a change when a reader of the merged table finds it, with all sensors on.

A source commits 1,000 row changes a second (`freshness_source.py`). `dagster dev` runs the lag
sensor and the merge sensor, captures and merges are runs of Dagster, and all settings have their
defaults. Five times a second, a reader looks for a new version of the SCD1 table by delta-rs. The
age of a marker is the time from its commit to its first read. Source and reader use the same clock.

The benchmark runs twice, with the Spark server of `pgcdc spark start` and with a Spark session in
each run. Each time it uses a new server, lake and Dagster. The first minute is a warm-up.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from benchmarks.freshness_source import (
    CHANGES_PER_SECOND,
    DATABASE,
    MARKERS,
    NAME,
    PUBLICATION,
    TABLE,
    Writer,
    source,
)
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.source import log
from pgcdc_assets.demo.dagster_dev import start_dagster, stop_dagster
from pgcdc_assets.local import free_port
from pgcdc_assets.orchestration.project.home import CONFIG
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify import compare_table

WARM_UP_SECONDS = scaled(60, least=10)
SECONDS = scaled(300, least=30)
_LIMIT = 15.0

_POLL_SECONDS = 0.2
_SECONDS_TO_BEGIN = 600.0
_SECONDS_TO_CATCH_UP = 600.0
_NEWS_SECONDS = 30.0
# Minimum share of the requested rate. Below it, the machine was too busy for a result.
_LEAST_RATE = 0.95


def run() -> Iterator[Result]:
    """Measure with the Spark server, then without it."""
    with roomy_folder("freshness-connect", 3) as folder:
        ages = _measure(folder, with_server=True)
        yield Result.reported("freshness_connect_p50", ages, "s")
        yield Result.against_limit(
            "freshness_connect_p95", ages, _LIMIT, "s", value=_percentile_95(ages)
        )
    with roomy_folder("freshness-embedded", 3) as folder:
        ages = _measure(folder, with_server=False)
        yield Result.reported("freshness_embedded_p50", ages, "s")
        yield Result.reported("freshness_embedded_p95", ages, "s", value=_percentile_95(ages))


def _measure(folder: Path, *, with_server: bool) -> list[float]:
    """Return the ages of the markers after the warm-up."""
    (folder / "dagster").mkdir()
    shutil.copyfile(CONFIG, folder / "dagster" / "dagster.yaml")
    spark = SparkServer(folder / "state").running(log) if with_server else nullcontext()
    with source(folder) as postgres, spark as server:
        conninfo = postgres.conninfo(DATABASE)
        environment = {
            "PGCDC_DSN": conninfo,
            "PGCDC_LAKE": str(folder / "lake"),
            "PGCDC_SPARK_REMOTE": server.remote if server is not None else "local",
            "DAGSTER_HOME": str(folder / "dagster"),
        }
        zone = RawZone(Lake(environment["PGCDC_LAKE"]), NAME)
        with _dagster(folder, environment) as check_dagster:
            ages = _follow(Reader(zone), conninfo, check_dagster)
        found = compare_table(
            ConnectionSettings(conninfo=conninfo, name=NAME), zone, PUBLICATION, "public", TABLE
        )
        if not found.is_equal:
            raise SystemExit(f"the table differs from its source: {found}")
    measured = [age for marker, age in sorted(ages.items()) if marker > WARM_UP_SECONDS]
    kind = "server" if with_server else "embedded"
    log(
        f"{kind}: {len(measured)} markers, p50 {statistics.median(measured):.1f} s, "
        f"p95 {_percentile_95(measured):.1f} s, {min(measured):.1f} to {max(measured):.1f} s; "
        f"{found.target_rows:,} rows equal their source"
    )
    return measured


def _follow(reader: Reader, conninfo: str, check: Callable[[], None]) -> dict[int, float]:
    """Write and read until every marker is found, and return the age of each marker."""
    _look_until(lambda: reader.has_table, reader, check, _SECONDS_TO_BEGIN, "a first merge")
    log("the snapshot is merged")
    with Writer(conninfo) as writer:

        def check_all() -> None:
            check()
            writer.check()

        end = time.monotonic() + WARM_UP_SECONDS + SECONDS
        _look_until(lambda: time.monotonic() >= end, reader, check_all, float("inf"), "the end")
    writer.check()
    rate = writer.changes / writer.seconds
    log(f"{writer.changes:,} changes were written, {rate:,.0f} a second")
    if rate < CHANGES_PER_SECOND * _LEAST_RATE:
        raise SystemExit(f"only {rate:,.0f} changes a second were written")
    _look_until(
        lambda: len(reader.ages) >= writer.markers,
        reader,
        check,
        _SECONDS_TO_CATCH_UP,
        "the last marker",
    )
    return reader.ages


class Reader:
    """Reads the SCD1 table, version by version.

    Attributes:
        ages: age of each marker at its first read, by the marker's number.
    """

    def __init__(self, zone: RawZone) -> None:
        self.ages: dict[int, float] = {}
        self._path = table_path(zone.lake, zone.name, "public", TABLE, 1)
        self._table: DeltaTable | None = None

    @property
    def has_table(self) -> bool:
        """Whether the table exists."""
        return self._table is not None

    def look(self) -> None:
        """Read the markers of a new version, if a new version exists."""
        if self._table is None:
            if not DeltaTable.is_deltatable(self._path):
                return
            self._table = DeltaTable(self._path)
        else:
            version = self._table.version()
            self._table.update_incremental()
            if self._table.version() == version:
                return
        seen_at = time.time()
        newest = MARKERS + max(self.ages, default=0)
        rows = pa.table(
            QueryBuilder()
            .register(TABLE, self._table)
            .execute(f"select id, updated_at from {TABLE} where id > {newest}")
        )
        for row in rows.to_pylist():
            self.ages[row["id"] - MARKERS] = seen_at - row["updated_at"].timestamp()


def _look_until(
    is_over: Callable[[], bool],
    reader: Reader,
    check: Callable[[], None],
    limit_seconds: float,
    awaited: str,
) -> None:
    """Read new versions until a condition is true, and print progress."""
    began = news = time.monotonic()
    while not is_over():
        check()
        reader.look()
        now = time.monotonic()
        if now - began > limit_seconds:
            raise SystemExit(f"{awaited} did not come within {limit_seconds:g} s")
        if now - news > _NEWS_SECONDS:
            news = now
            log(f"... waiting for {awaited}; {len(reader.ages)} markers seen")
        time.sleep(_POLL_SECONDS)


@contextmanager
def _dagster(folder: Path, environment: Mapping[str, str]) -> Iterator[Callable[[], None]]:
    """Run `dagster dev` inside the block, and yield a check that the process is running."""
    log_file = folder / "dagster.log"
    # A background job of a shell ignores SIGINT, which Dagster would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log_file.open("wb") as output:
        process = start_dagster(
            [
                *("-m", "benchmarks.freshness_definitions"),
                *("-h", "127.0.0.1", "-p", str(free_port())),
            ],
            Path(__file__).parents[1],
            environment,
            output,
        )

    def check() -> None:
        if process.poll() is not None:
            raise SystemExit(f"Dagster ended with status {process.returncode}")

    try:
        yield check
    except SystemExit:
        log(f"End of Dagster's log:\n{log_file.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        stop_dagster(process)


def _percentile_95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]
