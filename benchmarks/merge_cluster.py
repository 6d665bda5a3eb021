"""Merges on a Spark standalone cluster of this machine, with the lake in an S3 store.

A master and two workers with an executor each run here, beside the driver and versitygw: the four
share the cores, so the seconds say little about a real cluster. The ratio to the hand-written merge
(`recipe.py`) on the same cluster says what the package adds to the cost of the store and of tasks
on other machines. The driver is in this process, and then in the server of `pgcdc spark start`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from pyspark.sql import SparkSession

from benchmarks.orders import OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import OURS, SideBySide, fold_each
from benchmarks.source import log
from pgcdc_assets.demo.object_store import ObjectStore
from pgcdc_assets.orchestration.resources import SparkResource
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets_tests.support.cluster import CLUSTER_CONF, SparkCluster

ROWS = scaled(1_000_000)
RECENT_ROWS = ROWS // 10
CHANGES = scaled(100_000)
REPETITIONS = 3
_WARM_UP = 2
# The cluster does not have the default heap of `Benchmark.uses_spark`.
_DRIVER, _EXECUTORS = (CLUSTER_CONF[f"spark.{role}.memory"] for role in ("driver", "executor"))


def run() -> Iterator[Result]:
    """Measure windows of recent changes, with the driver in this process and in a server."""
    with (
        roomy_folder("merge-cluster", 8) as folder,
        ObjectStore(folder / "store") as store,
        patch.dict(os.environ, store.environment),
        SparkCluster(folder, store.environment) as cluster,
    ):
        lake = Lake(f"{store.lake}/driver")
        spark = SparkResource(remote="local", spark_config=cluster.conf).session(lake)
        yield from _measure(spark, lake, "cluster")
        lake = Lake(f"{store.lake}/connect")
        server = SparkServer(folder / "spark", cluster.conf, [lake.uri])
        with server.running(log) as running:
            spark = SparkResource(remote=running.remote).session(lake)
            yield from _measure(spark, lake, "cluster_connect")


def _measure(spark: SparkSession, lake: Lake, kind: str) -> Iterator[Result]:
    books = {"orders": OrderBook(ROWS)}
    try:
        sides = SideBySide(spark, RawOrders(lake, books), books)
        change = partial(OrderBook.mixed, count=CHANGES, recent=RECENT_ROWS)
        windows = [sides.land(change) for _ in range(_WARM_UP + REPETITIONS)]
        sides.copy()
        seconds = fold_each(sides.fold, windows, _WARM_UP, kind)
        sides.check()
    finally:
        spark.stop()
    ours, recipe = ([CHANGES / each for each in seconds[side]] for side in (OURS, "recipe"))
    result = Result.of(f"merge_100k_into_1m_on_a_{kind}_vs_recipe", ours, recipe, "changes/s")
    yield replace(result, settings={"heap": f"driver {_DRIVER}, executors {_EXECUTORS}"})
