"""Publications of many small tables of which few change, on one machine.

The same steps with 10, 100 and 500 tables show what grows with the number of tables. All steps run
in one process, as in a run of many windows, so the tables without a new commit are known. The ticks
and the runs are those of Dagster, with an instance in SQLite.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from unittest import mock

from dagster import DagsterEventType
from pyspark.sql import SparkSession

from benchmarks.orders import SCHEMA, OrderBook
from benchmarks.orders_location import OrdersLocation, orders_location
from benchmarks.raw_orders import CAPTURE, RawOrders
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import contents, merge_ours, path_of, timed
from benchmarks.source import log
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.orchestration.sensors import quiet_ticks
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.spark.session import spark_session

SIZES = [scaled(size, least=5) for size in (10, 100, 500)]
ROWS = 100
CHANGES = 10
FEW = 5
REPETITIONS = 5
RUNS = 3
_WARM_UP = 1
# The goals are those of the largest publication, by the entry without the number of tables.
_LIMITS = {"merge_sensor_tick": 0.2, "prepare_1_of": 0.3, f"merge_{FEW}_of": 3.0}


def run() -> Iterator[Result]:
    """Measure each number of tables."""
    spark = spark_session("pgcdc benchmark")
    try:
        for size in dict.fromkeys(SIZES):
            with roomy_folder(f"merge-wide-{size}", 1) as folder:
                books = {f"orders_{number:03d}": OrderBook(ROWS, number) for number in range(size)}
                yield from _measure(spark, RawOrders(folder, books), books)
    finally:
        spark.stop()


def _measure(spark: SparkSession, raw: RawOrders, books: dict[str, OrderBook]) -> Iterator[Result]:
    names, size = list(books), len(books)
    targets = tuple(CdcTable(SCHEMA, name) for name in names)
    # A run ends after the windows that the sensor has requested.
    policy = WindowPolicy(run_seconds=0)
    capture = CdcCapture(name=CAPTURE, publication=CAPTURE, tables=targets, windows=policy)

    def change(changed: Sequence[str]) -> LsnWindow:
        return raw.land([(name, books[name].versions(CHANGES, 1, ROWS)) for name in changed])

    def plan(window: LsnWindow) -> None:
        tasks = list(build_tasks(raw.zone, targets, window))
        busy = [each for each in tasks if not (isinstance(each, MergeTask) and each.is_idle)]
        if len(busy) != 1:
            raise SystemExit(f"{len(busy)} tables have changes instead of one")

    merge_ours(spark, raw, names, raw.land([]))
    with orders_location(capture, raw.zone.lake) as location:
        yield from _tick(location, size)

        plans = []
        for _ in range(_WARM_UP + REPETITIONS):
            window = change(names[:1])
            plans.append(timed(partial(plan, window)))
            merge_ours(spark, raw, names, window)
        yield _result("prepare_1_of", plans[_WARM_UP:], "s", size)

        merges = []
        for _ in range(_WARM_UP + REPETITIONS):
            window = change(names[:FEW])
            merges.append(timed(partial(merge_ours, spark, raw, names, window)))
        yield _result(f"merge_{FEW}_of", merges[_WARM_UP:], "s", size)
        log(f"{size} tables: plans {plans}, merges {merges}")

        runs = []
        for _ in range(_WARM_UP + RUNS):
            location.add_windows([change(names[:1])])
            runs.append(location.merge())
        yield from _count(location, runs[_WARM_UP:], size)
    for name in names[:FEW]:
        if contents(spark, path_of(raw, name))[0] != books[name].row_count:
            raise SystemExit(f"{name} should have {books[name].row_count} rows")


def _tick(location: OrdersLocation, size: int) -> Iterator[Result]:
    """Measure evaluations of the merge sensor, for which nothing waits."""
    cpu, wall = _evaluate(location)
    log(f"{size} tables: ticks {wall} s, CPU {cpu} s")
    yield _result("merge_sensor_tick", cpu, "s of CPU", size)
    yield Result.reported(f"merge_sensor_tick_{size}_tables_time", wall, "s")
    with mock.patch.object(quiet_ticks, "SECONDS", -1.0):
        cpu, _ = _evaluate(location)
    yield Result.reported(f"merge_sensor_whole_tick_{size}_tables", cpu, "s of CPU")


def _evaluate(location: OrdersLocation) -> tuple[list[float], list[float]]:
    """Evaluate the merge sensor, and return the seconds of CPU and the seconds."""
    cpu, wall = [], []
    for _ in range(_WARM_UP + REPETITIONS):
        began, cpu_before = time.perf_counter(), time.process_time()
        data = location.tick()
        cpu.append(time.process_time() - cpu_before)
        wall.append(time.perf_counter() - began)
        if data.run_requests:
            raise SystemExit("a table waits for a merge")
    return cpu[_WARM_UP:], wall[_WARM_UP:]


def _count(location: OrdersLocation, runs: Sequence[str], size: int) -> Iterator[Result]:
    """Count the events of runs in whose window one table changed."""

    def counts(kind: DagsterEventType) -> list[float]:
        return [float(location.count_events(run_id, kind)) for run_id in runs]

    name = f"1_of_{size}_tables"
    written = counts(DagsterEventType.ASSET_MATERIALIZATION)
    if size == max(SIZES):
        yield Result.against_limit(f"materialisations_{name}", written, 1, "events of a run")
    else:
        yield Result.reported(f"materialisations_{name}", written, "events of a run")
    planned = counts(DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    yield Result.reported(f"planned_materialisations_{name}", planned, "events of a run")


def _result(kind: str, values: Sequence[float], unit: str, size: int) -> Result:
    """Return a result with the limit of its kind, which the largest publication has."""
    name = f"{kind}_{size}_tables"
    if size == max(SIZES):
        return Result.against_limit(name, values, _LIMITS[kind], unit)
    return Result.reported(name, values, unit)
