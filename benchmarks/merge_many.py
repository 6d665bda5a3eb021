"""A window that changes a few rows of each of a hundred small tables.

The package merges the publication by one call, with the default parallelism of a capture. The
recipe (`recipe.py`) merges table after table. Both run in one warm embedded session, in turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.orders import OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import OURS, SideBySide, fold_each
from benchmarks.source import log
from pgcdc_assets.spark.session import spark_session

TABLES = scaled(100, least=3)
ROWS = 1_000
CHANGES = 10
REPETITIONS = 3
_WARM_UP = 1


def run() -> Iterator[Result]:
    """Measure the publication as a whole."""
    with roomy_folder("merge-many", 1) as folder:
        books = {f"orders_{number:03d}": OrderBook(ROWS, number) for number in range(TABLES)}
        raw = RawOrders(folder, books)
        spark = spark_session("pgcdc benchmark")
        try:
            sides = SideBySide(spark, raw, books)
            windows = [
                sides.land(lambda book: book.versions(CHANGES, 1, ROWS))
                for _ in range(_WARM_UP + REPETITIONS)
            ]
            log(f"{TABLES} tables of {ROWS:,} rows landed")
            sides.copy()
            seconds = fold_each(sides.fold, windows, _WARM_UP, f"{TABLES} tables")
            sides.check()
        finally:
            spark.stop()
    yield Result.of("merge_100_tables_vs_recipe", seconds[OURS], seconds["recipe"], "s")
    yield Result.against_limit("merge_100_tables", seconds[OURS], 12, "s")
