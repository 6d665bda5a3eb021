"""`make demo` from an installed clone, with no state, no JVM and no Postgres server running.

Each repetition runs the demonstration in a copy of the package in an empty folder, so it creates
the Postgres cluster, the shop, the lake and the Dagster instance, and starts a JVM. The packages,
the jars and the class archive are there, as after `make install`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.processes import run_measured
from benchmarks.results import Result
from benchmarks.source import log
from pgcdc_assets_tests.support.demo_clone import demo_clone

REPETITIONS = 3
LIMIT_SECONDS = 60.0

_EQUAL = "Every table of the lake equals its source"


def run() -> Iterator[Result]:
    """Measure the wall time of the command, from fork to exit."""
    seconds = []
    for _ in range(REPETITIONS):
        seconds.append(_run_once())
        log(f"the demonstration took {seconds[-1]:.1f} s")
    yield Result.against_limit("demo_cold", seconds, LIMIT_SECONDS, "s")


def _run_once() -> float:
    with demo_clone("pgcdc-bench-demo-") as folder:
        usage = run_measured(
            [sys.executable, "-m", "pgcdc_assets.demo"],
            environment={"PYTHONPATH": str(folder)},
            folder=folder,
        )
    if _EQUAL not in usage.output:
        raise SystemExit(usage.output)
    return usage.seconds
