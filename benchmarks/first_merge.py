"""The first merge of eight tiny tables in a process whose Spark session has just started.

Each repetition is a process with an embedded session and default settings, as of a run of Dagster
without a Spark server. The measurement begins before the import of Spark, and ends when the
snapshots and a window of changes of all tables are merged.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.orders import SCHEMA, OrderBook
from benchmarks.processes import run_measured
from benchmarks.raw_orders import CAPTURE, EPOCH, RawOrders
from benchmarks.results import Result
from benchmarks.scale import roomy_folder
from benchmarks.source import log
from pgcdc_assets.orchestration.resources import SparkResource
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable

TABLES = 8
ROWS = 100
CHANGES = 10
REPETITIONS = 3
BEFORE = "48 to 55 s before the sooner starts of decision 78"

_NAMES = [f"orders_{number}" for number in range(TABLES)]


def run() -> Iterator[Result]:
    """Measure the start of the session and the merge."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(REPETITIONS):
        with roomy_folder("first-merge", 1) as folder:
            books = {name: OrderBook(ROWS, number) for number, name in enumerate(_NAMES)}
            raw = RawOrders(folder, books)
            raw.land([(name, book.versions(CHANGES, 1, ROWS)) for name, book in books.items()])
            command = [sys.executable, "-m", "benchmarks.first_merge", str(folder)]
            seconds = json.loads(run_measured(command).output.splitlines()[-1])
        log(", ".join(f"{part} {taken:.1f} s" for part, taken in seconds.items()))
        for part, taken in seconds.items():
            parts[part].append(taken)
    whole = Result.reported(f"first_merge_{TABLES}_tables_cold", parts["whole"], "s")
    yield replace(whole, settings={"before": BEFORE})
    yield Result.reported(f"first_merge_{TABLES}_tables_cold_session", parts["session"], "s")


def measure(folder: Path) -> dict[str, float]:
    """Start a session and merge all tables, and return the seconds of both."""
    began = time.perf_counter()
    lake = Lake(str(folder))
    spark = SparkResource(remote="local").session(lake)
    session = time.perf_counter() - began
    from pgcdc_assets.merge import MergeFailure, merge_tables

    zone = RawZone(lake, CAPTURE)
    (*_, newest) = zone.changes.windows(EPOCH)
    targets = [CdcTable(SCHEMA, name) for name in _NAMES]
    for report in merge_tables(spark, zone, targets, newest.window):
        if isinstance(report, MergeFailure):
            raise SystemExit(f"{report.table} was not merged: {report.error}")
        if report.row_count != ROWS:
            raise SystemExit(f"{report.table} has {report.row_count} rows instead of {ROWS}")
    whole = time.perf_counter() - began
    spark.stop()
    return {"whole": whole, "session": session}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
