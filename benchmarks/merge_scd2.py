"""A million changes into a history of ten million rows, beside the same changes into SCD1.

Each window updates a third of a million orders of the last tenth three times, so each of these
orders gets three versions. Both tables are merged from the same raw zone, in turns, in one warm
embedded session.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pyspark.sql import SparkSession

from benchmarks.orders import OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.side_by_side import (
    contents,
    current_contents,
    landed_orders,
    merge_ours,
    path_of,
    shown,
    timed,
)
from benchmarks.source import log
from benchmarks.turns import in_turns

ROWS = scaled(10_000_000)
RECENT_ROWS = ROWS // 10
CHANGES = scaled(1_000_000)
VERSIONS = 3
REPETITIONS = 3
# The warm-up has many smaller windows, because the JVM's second compiler needs a minute of merges.
_WARM_UP = [CHANGES // 10] * 4
_TABLE = "orders"


def run() -> Iterator[Result]:
    """Measure both kinds of table."""
    with landed_orders("merge-scd2", 12, ROWS, _TABLE) as landed:
        yield from _measure(*landed)


def _measure(spark: SparkSession, raw: RawOrders, book: OrderBook) -> Iterator[Result]:
    first = raw.land([])
    counts = _WARM_UP + [CHANGES] * REPETITIONS
    # These windows are as dense as the large windows, so that the merge uses the same operation.
    changes = [book.versions(n, VERSIONS, RECENT_ROWS * n // CHANGES) for n in counts]
    windows = [raw.land([(_TABLE, each)]) for each in changes]
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for scd in seconds:
        copied = timed(partial(merge_ours, spark, raw, [_TABLE], first, scd))
        log(f"SCD{scd}: {ROWS:,} rows copied in {copied:.1f} s")
    for number, window in enumerate(windows):
        merges = {
            f"SCD{scd}": partial(timed, partial(merge_ours, spark, raw, [_TABLE], window, scd))
            for scd in seconds
        }
        taken = in_turns(merges, number)
        log(shown(taken))
        if number >= len(_WARM_UP):
            for scd in seconds:
                seconds[scd].append(taken[f"SCD{scd}"])
    _check(spark, raw, ROWS + sum(map(len, changes)))
    count = len(changes[-1])
    yield Result.reported("merge_scd2_1m_into_10m", [count / s for s in seconds[2]], "changes/s")
    yield Result.of("merge_scd2_vs_scd1_1m_into_10m", seconds[2], seconds[1], "s")


def _check(spark: SparkSession, raw: RawOrders, versions: int) -> None:
    """Check that the history has every version, and that its current rows equal SCD1."""
    current_contents(spark, raw, _TABLE)
    found, _ = contents(spark, path_of(raw, _TABLE, 2))
    if found != versions:
        raise SystemExit(f"of {versions} versions there are {found}")
