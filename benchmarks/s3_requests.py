"""Requests to an S3 store: of a landed window, a merge, a tick of the merge sensor, and a poll.

The store is versitygw behind the counting proxy of the tests, and no count depends on the speed of
the machine. The publication has ten small tables, of which one changes in each window.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from benchmarks.orders import SCHEMA, OrderBook
from benchmarks.proxied_store import proxied_store
from benchmarks.raw_orders import CAPTURE, EPOCH, RawOrders
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.side_by_side import merge_ours
from benchmarks.source import log
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.resources import SparkResource
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets_tests.support.object_store import StoreProxy

TABLES = 10
ROWS = 100
CHANGES = 10
# The log of raw/changes gets a checkpoint once in so many windows, and that of an SCD table twice.
WINDOWS = scaled(50, least=3)
MERGES = scaled(10, least=3)

Counts = list[Counter[str]]


def run() -> Iterator[Result]:
    """Measure each action in one process, as in a run of many windows."""
    with proxied_store() as (proxy, lake):
        yield from _measure(proxy, lake)


def _measure(proxy: StoreProxy, lake: Lake) -> Iterator[Result]:
    books = {f"orders_{number:03d}": OrderBook(ROWS, number) for number in range(TABLES)}
    raw, names = RawOrders(lake, books), list(books)
    capture = CdcCapture(CAPTURE, CAPTURE, tuple(CdcTable(SCHEMA, name) for name in names))

    def counted(action: Callable[[], object]) -> Counter[str]:
        proxy.forget()
        action()
        return proxy.counts()

    def land() -> LsnWindow:
        return raw.land([(names[0], books[names[0]].versions(CHANGES, 1, ROWS))])

    def tick() -> None:
        state = read_state(RawZone(lake, CAPTURE), capture)
        if any(table.needs_merge for table in state.tables):
            raise SystemExit("a table waits for a merge")

    yield _result("s3_requests_per_window", [counted(land) for _ in range(WINDOWS)])
    spark = SparkResource(remote="local").session(lake)
    try:
        merge_ours(spark, raw, names, raw.land([]))
        merges = []
        for _ in range(MERGES):
            window = land()
            merges.append(counted(partial(merge_ours, spark, raw, names, window)))
        yield _result("s3_requests_per_merge", merges)
    finally:
        spark.stop()
    tick()
    yield _result("s3_requests_per_tick", [counted(tick) for _ in range(5)])
    zone = RawZone(lake, CAPTURE)
    polls = [counted(lambda: zone.changes.captured_through(EPOCH)) for _ in range(5)]
    yield _result("s3_requests_per_poll", polls)


def _result(name: str, counts: Counts) -> Result:
    log(f"{name}: {counts}")
    totals = [float(each.total()) for each in counts]
    mean = statistics.mean(totals)
    kinds: Mapping[str, float] = {
        kind: statistics.mean(each[kind] for each in counts)
        for kind in ("GET", "HEAD", "LIST", "PUT", "POST", "DELETE")
    }
    shown = ", ".join(f"{kind} {number:.1f}" for kind, number in kinds.items() if number)
    result = Result.reported(name, totals, "requests, mean", value=mean)
    return replace(result, settings={"requests": shown})
