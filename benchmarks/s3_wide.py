"""A publication of 100 tables in an S3 store whose requests take 20 ms, of which one or all change.

The store is versitygw behind the proxy of the tests, which delays each request. The plan of a merge
and a tick of the merge sensor read all tables, several at a time; the other side is the same code
with one table at a time. All steps run in one process, as in a run of many windows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from unittest.mock import patch

from benchmarks.orders import SCHEMA, OrderBook
from benchmarks.proxied_store import proxied_store
from benchmarks.raw_orders import CAPTURE, RawOrders
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.side_by_side import merge_ours, timed
from benchmarks.turns import in_turns
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.orchestration.resources import SparkResource
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw import table_threads
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.object_store_proxy import Fault

TABLES = scaled(100, least=10)
ROWS = 100
CHANGES = 10
REPETITIONS = 5
DELAY_SECONDS = 0.02
_UNIT = "s"


def run() -> Iterator[Result]:
    """Measure landings, plans, merges and ticks."""
    with proxied_store() as (proxy, lake):
        yield from _measure(proxy, lake)


def _measure(proxy: StoreProxy, lake: Lake) -> Iterator[Result]:
    books = {f"orders_{number:03d}": OrderBook(ROWS, number) for number in range(TABLES)}
    raw, names = RawOrders(lake, books), list(books)
    targets = tuple(CdcTable(SCHEMA, name) for name in names)
    capture = CdcCapture(CAPTURE, CAPTURE, targets)

    windows: list[LsnWindow] = []

    def land(changed: Sequence[str] = names[:1]) -> None:
        parts = [(name, books[name].versions(CHANGES, 1, ROWS)) for name in changed]
        windows.append(raw.land(parts))

    def plan() -> None:
        list(build_tasks(raw.zone, targets, windows[-1]))

    def merge() -> None:
        merge_ours(spark, raw, names, windows[-1])

    def of_all(measure: Callable[[Callable[[], None]], float]) -> float:
        land(names)
        return measure(merge)

    def tick() -> None:
        read_state(RawZone(lake, CAPTURE), capture)

    spark = SparkResource(remote="local").session(lake)
    try:
        merge_ours(spark, raw, names, raw.land([]))
        tick()
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        with proxy.making(Fault("delay", seconds=DELAY_SECONDS)):
            for number in range(REPETITIONS):
                seconds["window"].append(timed(land))
                for name, action in (("plan", plan), ("tick", tick)):
                    sides = {
                        name: partial(timed, action),
                        f"{name}_by_one": partial(_timed_one_by_one, action),
                    }
                    for side, found in in_turns(sides, number).items():
                        seconds[side].append(found)
                seconds["merge"].append(timed(merge))
                everywhere = {
                    "merge_all": partial(of_all, timed),
                    "merge_all_by_one": partial(of_all, _timed_one_by_one),
                }
                for side, found in in_turns(everywhere, number).items():
                    seconds[side].append(found)
    finally:
        spark.stop()
    yield Result.reported("s3_window_at_20_ms", seconds["window"], _UNIT)
    for name in ("plan", "tick"):
        of = f"s3_{name}_of_{TABLES}_tables_at_20_ms"
        yield Result.of(of, seconds[name], seconds[f"{name}_by_one"], _UNIT)
    of = f"s3_merge_{TABLES}_tables_at_20_ms"
    yield Result.of(of, seconds["merge_all"], seconds["merge_all_by_one"], _UNIT)
    yield Result.reported(f"s3_merge_1_of_{TABLES}_tables_at_20_ms", seconds["merge"], _UNIT)


def _timed_one_by_one(action: Callable[[], None]) -> float:
    with patch.object(table_threads, "AT_A_TIME", 1):
        return timed(action)
