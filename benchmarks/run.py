"""Runs benchmarks, prints their table and keeps their results: `make bench [ONLY=capture,merge]`.

A benchmark is a module with a function `run` that yields results; it stands in `BENCHMARKS` under
the name that ONLY takes.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.results import RESULTS, Result, save, table
from benchmarks.scale import SCALE

BENCHMARKS = {
    "capture": "benchmarks.capture",
    "large": "benchmarks.capture_large",
    "wire": "benchmarks.capture_wire",
    "copy": "benchmarks.table_copy",
    "merge": "benchmarks.merge",
    "merge_cost": "benchmarks.merge_cost",
    "merge_scd2": "benchmarks.merge_scd2",
    "merge_growth": "benchmarks.merge_growth",
    "merge_many": "benchmarks.merge_many",
    "disk": "benchmarks.disk",
    "verify": "benchmarks.verify",
    "verify_small": "benchmarks.verify_small",
    "sync": "benchmarks.sync",
    "sync_small": "benchmarks.sync_small",
    "freshness": "benchmarks.freshness",
}


def main() -> int:
    """Run what is asked for; the results of a benchmark are kept as soon as it has ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", default=",".join(BENCHMARKS), help=f"some of: {', '.join(BENCHMARKS)}"
    )
    names = parser.parse_args().only.split(",")
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        parser.error(
            f"no benchmark is named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}"
        )
    measured: list[Result] = []
    for name in names:
        print(f"{name}:", file=sys.stderr, flush=True)
        results = list(importlib.import_module(BENCHMARKS[name]).run())
        if SCALE == 1:
            save(results)
        measured += results
    print(table(measured))
    print(f"\nkept in {RESULTS}" if SCALE == 1 else f"\nat scale {SCALE:g}: not kept")
    return 0
