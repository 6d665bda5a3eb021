"""Many small merges into a large table, as in a run that merges every few seconds.

Each window changes a thousand of the last 100,000 orders. Every merge leaves small files, so a
table without compaction has more files with each merge. Current image and history are merged from
the same raw zone in one warm embedded session. The last merges are compared with the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from benchmarks.orders import OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.side_by_side import (
    current_contents,
    landed_orders,
    merge_ours,
    path_of,
    timed,
)
from benchmarks.source import log

ROWS = scaled(1_000_000)
RECENT_ROWS = scaled(100_000)
CHANGES = scaled(1_000, least=10)
MERGES = 150
_WARM_UP = 10
# The first merges after the warm-up are compared with so many of the last ones.
_COMPARED = 15
_TABLE = "orders"


def run() -> Iterator[Result]:
    """Measure a current image and a history."""
    with landed_orders("merge-repeated", 5, ROWS, _TABLE) as landed:
        yield from _measure(*landed)


def _measure(spark: SparkSession, raw: RawOrders, book: OrderBook) -> Iterator[Result]:
    first = raw.land([])
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for scd in seconds:
        merge_ours(spark, raw, [_TABLE], first, scd)
    for number in range(_WARM_UP + MERGES):
        window = raw.land([(_TABLE, book.mixed(CHANGES, RECENT_ROWS))])
        for scd, taken in seconds.items():
            taken.append(timed(partial(merge_ours, spark, raw, [_TABLE], window, scd)))
        if number % 10 == 9:
            log(f"{number + 1} merges: {_describe(raw, seconds)}")
    _check(spark, raw, book)
    for scd, taken in seconds.items():
        early, late = taken[_WARM_UP:][:_COMPARED], taken[-_COMPARED:]
        name = f"merge_scd{scd}_after_{MERGES}_merges_vs_before"
        files = {"files at the end": f"{_count_files(raw, scd):,}"}
        yield replace(Result.of(name, late, early, "s"), settings=files)


def _describe(raw: RawOrders, seconds: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(
        f"SCD{scd} {sum(taken[-10:]) / 10:.2f} s with {_count_files(raw, scd):,} files"
        for scd, taken in seconds.items()
    )


def _count_files(raw: RawOrders, scd: int) -> int:
    return len(DeltaTable(path_of(raw, _TABLE, scd)).file_uris())


def _check(spark: SparkSession, raw: RawOrders, book: OrderBook) -> None:
    """Check that both tables have the rows of the book."""
    count, _ = current_contents(spark, raw, _TABLE)
    if count != book.row_count:
        raise SystemExit(f"the tables have {count} rows; {book.row_count} are expected")
