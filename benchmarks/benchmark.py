"""The list of benchmarks: names, workloads and durations.

A benchmark is a module whose function `run` yields results.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.results import Result
from pgcdc_assets.spark.settings import embedded_conf


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        module: name of the module.
        workload: short description of the workload.
        minutes: approximate duration on an idle machine with two cores. `results.json` has the
            duration of the newest run.
        postgres: major version of the server; None without a server.
        uses_spark: the benchmark starts a session, with the default heap.
    """

    module: str
    workload: str
    minutes: int
    postgres: int | None = 18
    uses_spark: bool = False

    def run(self) -> Iterator[Result]:
        """Run the benchmark, and yield each result after its measurement."""
        results: Iterator[Result] = importlib.import_module(f"benchmarks.{self.module}").run()
        yield from results

    def settings(self) -> dict[str, str]:
        """Return the settings of every result of this benchmark."""
        heap = {"heap": embedded_conf()["spark.driver.memory"]} if self.uses_spark else {}
        return {"workload": self.workload, **heap}


_STREAM = "800,000 row changes of two tables in transactions of 1,000"

# The keys are the names for ONLY.
BENCHMARKS: Mapping[str, Benchmark] = {
    "capture": Benchmark("capture", _STREAM, 5),
    "tls": Benchmark("capture_tls", _STREAM, 4, postgres=15),
    "large": Benchmark("capture_large", "one transaction of 5,000,000 inserts", 8),
    "streaming": Benchmark("capture_streaming", "one transaction of 5,000,000 inserts", 12),
    "wide": Benchmark(
        "capture_wide", "40,000 rows of 800 columns; 900,000 rows of 8 columns, 51 MB each", 1
    ),
    "capture_trickle": Benchmark(
        "capture_trickle",
        "windows of 100,000 rows beside an open transaction; of one row; of one second",
        6,
    ),
    "wire": Benchmark("capture_wire", _STREAM, 5),
    "copy": Benchmark("table_copy", "500,000 orders; 1,000,000 rows of 2 KB", 4),
    "copies": Benchmark("copy_connections", "5,000,000 orders; 100 tables of 10,000 orders", 7),
    "merge": Benchmark("merge", "750,000 changes of orders", 6, uses_spark=True),
    "merge_arrays": Benchmark("merge_arrays", "750,000 changes of orders", 6, uses_spark=True),
    "merge_cost": Benchmark(
        "merge_cost", "windows of 1,000,000 changes into 10,000,000 rows", 16, None, True
    ),
    "merge_scd2": Benchmark(
        "merge_scd2", "windows of 1,000,000 changes into 10,000,000 rows", 10, None, True
    ),
    "merge_growth": Benchmark(
        "merge_growth", "windows of 10,000 changes into 1, 10 and 30 million rows", 15, None, True
    ),
    "merge_repeated": Benchmark(
        "merge_repeated",
        "160 windows of 1,000 changes into 1,000,000 rows, a merge of each",
        17,
        None,
        True,
    ),
    "merge_many": Benchmark(
        "merge_many",
        "windows of 10 changes in each of 10, 100 and 500 tables of 1,000 rows",
        15,
        None,
        True,
    ),
    "merge_histories": Benchmark(
        "merge_histories",
        "windows of 10 changes in each of 20 histories of 1,000 rows",
        4,
        None,
        True,
    ),
    "merge_wide": Benchmark(
        "merge_wide",
        "10, 100 and 500 tables of 100 rows, of which none, one or five change",
        4,
        None,
        True,
    ),
    "merge_cluster": Benchmark(
        "merge_cluster",
        "windows of 100,000 changes into 1,000,000 rows in S3, two executors",
        8,
        None,
    ),
    "window_growth": Benchmark(
        "window_growth",
        "100 and 10,000 windows of 10 changes of one of 20 tables of 100 rows",
        20,
        None,
        True,
    ),
    "log_entries": Benchmark("log_entries", "logs of 10,000 to 10,000,000 commits", 20, None),
    "large_tables": Benchmark(
        "large_tables", "logs of tables of 1,000 and 10,000 files of a million rows", 1, None
    ),
    "s3_requests": Benchmark(
        "s3_requests", "windows and merges of one of 10 tables, ticks and polls", 2, None, True
    ),
    "s3_wide": Benchmark(
        "s3_wide", "100 tables of which one changes, 20 ms for each request", 3, None, True
    ),
    "settled": Benchmark(
        "settled", "the maintenance of 6 tables of 5,000 rows without a change", 3, None, True
    ),
    "disk": Benchmark(
        "disk", "40 windows of 20 changes in each of 9 tables of 60,000 rows", 10, None, True
    ),
    "verify": Benchmark("verify", "2,000,000 orders, 20,000 changed", 8, uses_spark=True),
    "verify_small": Benchmark("verify_small", "9 tables of 1,000 rows", 3, uses_spark=True),
    "sync": Benchmark("sync", _STREAM, 7, uses_spark=True),
    "sync_small": Benchmark("sync_small", "10 changes of 25,000 orders", 7, uses_spark=True),
    "first_merge": Benchmark(
        "first_merge", "8 tables of 100 rows with 10 changes each", 2, None, uses_spark=True
    ),
    "run_overhead": Benchmark(
        "run_overhead", "10 changes of 100,000 orders at a time", 5, uses_spark=True
    ),
    "demo_cold": Benchmark("demo_cold", "a shop of 10,000 orders", 4, uses_spark=True),
    "freshness": Benchmark(
        "freshness",
        "1,000 changes a second to 1 and to 100 tables for 10 minutes, 100,000 orders",
        42,
        uses_spark=True,
    ),
    "soak": Benchmark(
        "soak",
        "20,000 windows of 20 tables, half of them with a history, with the maintenance on",
        130,
        uses_spark=True,
    ),
    "peers": Benchmark("peers.run", _STREAM, 30, postgres=15),
}
