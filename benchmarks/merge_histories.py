"""A window that changes a few rows of each of 20 small tables with a history (SCD2).

The package merges the histories together, without a Spark job for each, and by one merge of Spark
for each, as the environment variable `PGCDC_MERGE_SMALL_TABLES` asks. Each way has its own tables,
over the same raw zone, in one warm embedded session, in turns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

from pyspark.sql import SparkSession

from benchmarks.orders import OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import contents, fold_each, merge_ours, path_of, timed
from benchmarks.source import log
from benchmarks.turns import in_turns
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge.batch.scope import APART, SMALL_TABLES
from pgcdc_assets.spark.session import spark_session

TABLES = scaled(20, least=2)
ROWS = 1_000
CHANGES = 10
REPETITIONS = 5
_WARM_UP = 1
_TOGETHER, _BY_SPARK = "together", "by spark"


def run() -> Iterator[Result]:
    """Measure both ways."""
    spark = spark_session("pgcdc benchmark")
    try:
        with roomy_folder("merge-histories", 2) as folder:
            books = {f"orders_{number:03d}": OrderBook(ROWS, number) for number in range(TABLES)}
            raw = RawOrders(folder, books)
            first = raw.land([])
            windows = [_land(raw, books) for _ in range(_WARM_UP + REPETITIONS)]
            log(f"{TABLES} tables of {ROWS:,} rows landed")
            for way in (_TOGETHER, _BY_SPARK):
                _merge(spark, raw, list(books), way, first)

            def fold(window: LsnWindow, number: int) -> dict[str, float]:
                merges = {
                    way: partial(_merge, spark, raw, list(books), way, window)
                    for way in (_TOGETHER, _BY_SPARK)
                }
                return in_turns({way: partial(timed, each) for way, each in merges.items()}, number)

            seconds = fold_each(fold, windows, _WARM_UP, f"{TABLES} histories")
            _check(spark, raw, books)
    finally:
        spark.stop()
    name = f"merge_{TABLES}_histories_vs_spark"
    yield Result.of(name, seconds[_TOGETHER], seconds[_BY_SPARK], "s")


def _land(raw: RawOrders, books: dict[str, OrderBook]) -> LsnWindow:
    """Land a window with changes of every table."""
    return raw.land([(table, book.versions(CHANGES, 1, ROWS)) for table, book in books.items()])


def _merge(
    spark: SparkSession, raw: RawOrders, tables: list[str], way: str, through: LsnWindow
) -> None:
    environment = {SMALL_TABLES: APART} if way == _BY_SPARK else {}
    with patch.dict(os.environ, environment):
        merge_ours(spark, raw, tables, through, 2, _root(raw, way))


def _root(raw: RawOrders, way: str) -> str:
    return raw.zone.lake.path(way.replace(" ", "-"))


def _check(spark: SparkSession, raw: RawOrders, books: dict[str, OrderBook]) -> None:
    """Check that both ways have the same versions, and the current rows of the books."""
    for table, book in books.items():
        found = []
        for way in (_TOGETHER, _BY_SPARK):
            path = path_of(raw, table, 2, _root(raw, way))
            found.append((contents(spark, path), contents(spark, path, "_is_current")))
        if found[0] != found[1] or found[0][1][0] != book.row_count:
            raise SystemExit(
                f"{table} should have {book.row_count} current rows; (rows, sum of hashes) of all "
                f"and of current versions: {found}"
            )
