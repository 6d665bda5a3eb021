"""Ten thousand changes into tables of one, ten and thirty million rows.

The changes affect the last 100,000 orders of each table, so the cost should not depend on the size
of the table. The package and the recipe (`recipe.py`) take turns in one warm embedded session, each
with its own tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.orders import OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import OURS, SideBySide, shown
from benchmarks.source import log
from benchmarks.turns import in_turns
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.spark.session import spark_session

SIZES = {
    "1m": scaled(1_000_000),
    "10m": scaled(10_000_000),
    "30m": scaled(30_000_000),
}
RECENT_ROWS = scaled(100_000)
CHANGES = scaled(10_000)
REPETITIONS = 5
_WARM_UP = 2


def run() -> Iterator[Result]:
    """Measure the three sizes in turns."""
    with roomy_folder("merge-growth", 15) as folder:
        spark = spark_session("pgcdc benchmark")
        try:
            tables: dict[str, SideBySide] = {}
            windows: dict[str, list[LsnWindow]] = {}
            for size, rows in SIZES.items():
                books = {"orders": OrderBook(rows)}
                tables[size] = SideBySide(spark, RawOrders(folder / size, books), books)
                windows[size] = [
                    tables[size].land(lambda book: book.mixed(CHANGES, RECENT_ROWS))
                    for _ in range(_WARM_UP + REPETITIONS)
                ]
                tables[size].copy()
            ours, recipe = _fold(tables, windows)
            for sides in tables.values():
                sides.check()
        finally:
            spark.stop()
    for size in ("10m", "30m"):
        yield Result.of(f"merge_10k_into_{size}_vs_1m", ours[size], ours["1m"], "s")
    for size in SIZES:
        yield Result.of(f"merge_10k_into_{size}_vs_recipe", ours[size], recipe[size], "s")


def _fold(
    tables: dict[str, SideBySide], windows: dict[str, list[LsnWindow]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Fold windows into all tables, and return the seconds of the package and of the recipe."""
    ours: dict[str, list[float]] = {size: [] for size in tables}
    recipe: dict[str, list[float]] = {size: [] for size in tables}
    for number in range(_WARM_UP + REPETITIONS):
        folds = {
            size: partial(sides.fold, windows[size][number], number)
            for size, sides in tables.items()
        }
        for size, taken in in_turns(folds, number).items():
            log(f"{size}: {shown(taken)}")
            if number >= _WARM_UP:
                ours[size].append(taken[OURS])
                recipe[size].append(taken["recipe"])
    return ours, recipe
