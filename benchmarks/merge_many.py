"""A window that changes a few rows of each of 10, 100 and 500 small tables.

The package merges the publication by one call, with the default parallelism of a capture. The
recipe (`recipe.py`) merges table after table. Both run in one warm embedded session, in turns. Five
hundred tables are merged by the package only: the recipe would need an hour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyspark.sql import SparkSession

from benchmarks.orders import OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import OURS, SideBySide, fold_each
from benchmarks.source import log
from pgcdc_assets.spark.session import spark_session

# The scaled numbers are different too, because they are in the names of the results.
COMPARED = (scaled(10, least=2), scaled(100, least=3))
ALONE = scaled(500, least=4)
LIMITED, LIMIT_SECONDS = COMPARED[1], 12
ROWS = 1_000
CHANGES = 10
REPETITIONS = 3
_WARM_UP = 1
_RECIPE = "recipe"
_CHECKED = 20


def run() -> Iterator[Result]:
    """Measure each publication as a whole."""
    spark = spark_session("pgcdc benchmark")
    try:
        for size in COMPARED:
            seconds = _fold(spark, size, [_RECIPE])
            yield Result.of(f"merge_{size}_tables_vs_recipe", seconds[OURS], seconds[_RECIPE], "s")
            if size == LIMITED:
                yield Result.against_limit(
                    f"merge_{size}_tables", seconds[OURS], LIMIT_SECONDS, "s"
                )
        yield Result.reported(f"merge_{ALONE}_tables", _fold(spark, ALONE, [])[OURS], "s")
    finally:
        spark.stop()


def _fold(spark: SparkSession, size: int, recipes: Sequence[str]) -> dict[str, list[float]]:
    """Return the seconds of each side for the windows after the warm-up."""
    with roomy_folder(f"merge-many-{size}", 2) as folder:
        books = {f"orders_{number:03d}": OrderBook(ROWS, number) for number in range(size)}
        sides = SideBySide(spark, RawOrders(folder, books), books, recipes)
        windows = [
            sides.land(lambda book: book.versions(CHANGES, 1, ROWS))
            for _ in range(_WARM_UP + REPETITIONS)
        ]
        log(f"{size} tables of {ROWS:,} rows landed")
        sides.copy()
        seconds = fold_each(sides.fold, windows, _WARM_UP, f"{size} tables")
        sides.check(_CHECKED if size == ALONE else None)
        return seconds
