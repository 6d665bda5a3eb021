"""A million changes into a table of ten million rows, beside a hand-written merge.

Two kinds of windows are folded into the same tables: first changes of the last tenth of the orders,
as in most order books, then changes that are spread evenly over all orders. The package's merge and
the recipes (`recipe.py`), with Delta's default properties and with deletion vectors, take turns in
one warm embedded session, each with its own table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.orders import OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.recipe import RECIPES
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import OURS, SideBySide, fold_each
from benchmarks.source import log
from pgcdc_assets.spark.session import spark_session

ROWS = scaled(10_000_000)
RECENT_ROWS = ROWS // 10
CHANGES = scaled(1_000_000)
REPETITIONS = 3
# The warm-up has many smaller windows, because the JVM's second compiler needs a minute of merges.
# It also has a window of the full size, because two recipes share code and so warm up faster.
_WARM_UP = [CHANGES // 10] * 5 + [CHANGES]


def run() -> Iterator[Result]:
    """Measure local changes, then spread changes."""
    with roomy_folder("merge-cost", 16) as folder:
        books = {"orders": OrderBook(ROWS)}
        raw = RawOrders(folder, books)
        log(f"{ROWS:,} rows landed")
        spark = spark_session("pgcdc benchmark")
        try:
            sides = SideBySide(spark, raw, books, list(RECIPES))
            kinds: tuple[tuple[str, int | None], ...] = (("local", RECENT_ROWS), ("spread", None))
            windows = {
                kind: [
                    sides.land(partial(OrderBook.mixed, count=count, recent=recent))
                    for count in _WARM_UP + [CHANGES] * REPETITIONS
                ]
                for kind, recent in kinds
            }
            log(f"{sum(map(len, windows.values()))} windows of changes landed")
            sides.copy()
            for kind, following in windows.items():
                seconds = fold_each(sides.fold, following, len(_WARM_UP), kind)
                speeds = {side: [CHANGES / s for s in each] for side, each in seconds.items()}
                for name in RECIPES:
                    yield Result.of(
                        f"merge_1m_{kind}_into_10m_vs_{name}",
                        speeds[OURS],
                        speeds[name],
                        "changes/s",
                    )
            sides.check()
        finally:
            spark.stop()
