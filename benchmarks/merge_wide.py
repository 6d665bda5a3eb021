"""Publications of many small tables of which few change, on one machine.

The same steps with 10, 100 and 500 tables show what grows with the number of tables. All steps run
in one process, as in a run of many windows, so the tables without a new commit are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from pyspark.sql import SparkSession

from benchmarks.orders import SCHEMA, OrderBook
from benchmarks.raw_orders import CAPTURE, RawOrders
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import contents, merge_ours, path_of, timed
from benchmarks.source import log
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.spark.session import spark_session

SIZES = [scaled(size, least=5) for size in (10, 100, 500)]
ROWS = 100
CHANGES = 10
FEW = 5
REPETITIONS = 5
_WARM_UP = 1


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
    capture = CdcCapture(name=CAPTURE, publication=CAPTURE, tables=targets)

    def change(changed: Sequence[str]) -> LsnWindow:
        return raw.land([(name, books[name].versions(CHANGES, 1, ROWS)) for name in changed])

    def tick() -> None:
        state = read_state(RawZone(raw.zone.lake, raw.zone.name), capture)
        if any(table.needs_merge for table in state.tables):
            raise SystemExit("a table waits for a merge")

    def plan(window: LsnWindow) -> None:
        tasks = list(build_tasks(raw.zone, targets, window))
        busy = [each for each in tasks if not (isinstance(each, MergeTask) and each.is_idle)]
        if len(busy) != 1:
            raise SystemExit(f"{len(busy)} tables have changes instead of one")

    merge_ours(spark, raw, names, raw.land([]))
    ticks = _repeated(lambda: _cpu(tick))
    yield Result.reported(f"merge_sensor_tick_{size}_tables", ticks, "s of CPU")

    plans = []
    for _ in range(_WARM_UP + REPETITIONS):
        window = change(names[:1])
        plans.append(timed(partial(plan, window)))
        merge_ours(spark, raw, names, window)
    yield Result.reported(f"prepare_1_of_{size}_tables", plans[_WARM_UP:], "s")

    merges = []
    for _ in range(_WARM_UP + REPETITIONS):
        window = change(names[:FEW])
        merges.append(timed(partial(merge_ours, spark, raw, names, window)))
    log(f"{size} tables: ticks {ticks}, plans {plans}, merges {merges}")
    yield Result.reported(f"merge_{FEW}_of_{size}_tables", merges[_WARM_UP:], "s")
    for name in names[:FEW]:
        if contents(spark, path_of(raw, name))[0] != books[name].row_count:
            raise SystemExit(f"{name} should have {books[name].row_count} rows")


def _repeated(measure: Callable[[], float]) -> list[float]:
    return [measure() for _ in range(_WARM_UP + REPETITIONS)][_WARM_UP:]


def _cpu(action: Callable[[], None]) -> float:
    """Return the seconds of CPU of an action in this process."""
    began = time.process_time()
    action()
    return time.process_time() - began
