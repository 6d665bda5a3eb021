"""Costs after a hundred and after ten thousand landed windows.

Each window changes ten rows of one of twenty small tables. As in a capture, the maintenance of
the raw zone follows each landing, with its own limits and retention. Windows of a few hours are
landed in minutes, so no log entry reaches the age at which the maintenance deletes it. The lake is
in memory if possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import SparkSession

from benchmarks.orders import SCHEMA, OrderBook
from benchmarks.orders_location import OrdersLocation, orders_location
from benchmarks.raw_orders import CAPTURE, EPOCH, RawOrders
from benchmarks.results import Result
from benchmarks.scale import memory_folder, scaled
from benchmarks.side_by_side import merge_ours, timed
from benchmarks.source import log
from pgcdc_assets.merge import MergeFailure
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.spark.session import spark_session

SIZES = (scaled(100, least=10), scaled(10_000, least=40))
TABLES = 20
ROWS = 100
CHANGES = 10
LANDINGS = 20
REPETITIONS = 5
_WARM_UP = 1
# Each plan reads the changes of all windows.
_BEHIND = 3


def run() -> Iterator[Result]:
    """Land windows up to each number, and measure."""
    spark = spark_session("pgcdc benchmark")
    try:
        with memory_folder("window-growth") as folder:
            life = _Life(spark, Lake(str(folder)))
            with orders_location(life.capture, life.raw.zone.lake) as location:
                for size in SIZES:
                    yield from _measure(life, location, size)
    finally:
        spark.stop()


@dataclass
class _Life:
    """A capture whose windows are landed one after the other.

    Attributes:
        newest: the newest window.
        count: the number of landed windows.
        landings: the seconds of the newest landings.
        maintenances: the seconds of the maintenance after each of them.
    """

    spark: SparkSession
    lake: Lake
    count: int = 0
    landings: list[float] = field(default_factory=list)
    maintenances: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._books = {f"orders_{n:03d}": OrderBook(ROWS, n) for n in range(TABLES)}
        self.names = list(self._books)
        self.raw = RawOrders(self.lake, self._books)
        targets = tuple(CdcTable(SCHEMA, name) for name in self.names)
        self.capture = CdcCapture(CAPTURE, CAPTURE, targets)
        self.newest = self.raw.land([])
        self.merge()

    def land_through(self, size: int) -> None:
        """Land windows up to a number.

        A maintenance without enough to do only opens `raw/changes`. So most of these calls are left
        out before the last landings.
        """
        while self.count < size:
            self.land(is_maintained=self.count % 16 == 0 or self.count >= size - LANDINGS)

    def land(self, *, is_maintained: bool = True) -> None:
        """Land a window of one table, and maintain the raw zone."""
        name = self.names[self.count % TABLES]
        changes = self._books[name].versions(CHANGES, 1, ROWS)
        began = time.perf_counter()
        self.newest = self.raw.land([(name, changes)])
        landed = time.perf_counter()
        self.count += 1
        if is_maintained:
            maintain_raw_zone(self.raw.zone)
            self.landings = [*self.landings[1 - LANDINGS :], landed - began]
            self.maintenances = [*self.maintenances[1 - LANDINGS :], time.perf_counter() - landed]

    def merge(self) -> None:
        """Merge all tables through the newest window."""
        merge_ours(self.spark, self.raw, self.names, self.newest)

    def prepare(self) -> None:
        """Plan the merge of all tables."""
        tasks = list(build_tasks(self.raw.zone, self.capture.tables, self.newest))
        if any(isinstance(task, MergeFailure) for task in tasks):
            raise SystemExit("a table cannot be merged")


def _measure(life: _Life, location: OrdersLocation, size: int) -> Iterator[Result]:
    """Measure with so many landed windows."""
    began, before = time.monotonic(), life.count
    life.land_through(size)
    log(f"{life.count - before:,} windows were landed in {time.monotonic() - began:.0f} s")
    after = f"after_{size}_windows"
    yield Result.reported(f"land_{after}", life.landings, "s")
    yield Result.reported(f"maintain_raw_zone_{after}", life.maintenances, "s")

    def open_zone() -> None:
        zone = RawZone(life.lake, CAPTURE)
        if zone.changes.table.load() is None:
            raise SystemExit("the raw zone is empty")

    def list_windows() -> None:
        found = len(RawZone(life.lake, CAPTURE).changes.windows(EPOCH))
        if found <= size:
            raise SystemExit(f"{found} windows instead of more than {size}")

    yield Result.reported(f"open_raw_zone_{after}", _repeated(open_zone), "s")
    yield Result.reported(f"list_windows_{after}", _repeated(list_windows), "s")
    behind = [timed(life.prepare) for _ in range(_BEHIND)]
    yield Result.reported(f"prepare_{size}_windows_behind", behind, "s")
    life.merge()
    plans = []
    for _ in range(_WARM_UP + REPETITIONS):
        life.land()
        plans.append(timed(life.prepare))
        life.merge()
    yield Result.reported(f"prepare_{after}", plans[_WARM_UP:], "s")
    yield Result.reported(f"merge_sensor_tick_{after}", _repeated(partial(_tick, location)), "s")


def _tick(location: OrdersLocation) -> None:
    if location.tick().run_requests:
        raise SystemExit("a table waits for a merge")


def _repeated(action: Callable[[], None]) -> list[float]:
    return [timed(action) for _ in range(_WARM_UP + REPETITIONS)][_WARM_UP:]
