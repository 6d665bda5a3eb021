"""Merge of the workload's orders with typed columns, beside the same merge with text.

Orders have `tags text[]` and `details jsonb`. By default these are an `ARRAY<STRING>` and text. The
other side keeps the texts of Postgres for both, by the setting `types`. Both sides fold the whole
workload into a new SCD1 table, in one warm embedded session, in turns.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import workload
from benchmarks.merge import ORDERS, capture_orders, copy_lake, merge_orders
from benchmarks.results import Result
from benchmarks.source import log, source
from benchmarks.turns import in_turns
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.session import spark_session

REPETITIONS = 5
_WARM_UP = 2
_TABLES = {"typed": ORDERS, "text": replace(ORDERS, types={"tags": "STRING", "details": "STRING"})}


def run() -> Iterator[Result]:
    """Measure both merges."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-bench-merge-arrays-") as folder:
        root = Path(folder)
        with source(workload.run) as server:
            windows = capture_orders(server, RawZone(Lake(str(root / "captured")), "bench"))
        taken: defaultdict[str, list[float]] = defaultdict(list)
        spark = spark_session("pgcdc benchmark")
        try:
            for number in range(_WARM_UP + REPETITIONS):
                merges = {
                    name: partial(
                        merge_orders,
                        spark,
                        copy_lake(root, f"{name}-{number}"),
                        windows[-1],
                        table,
                    )
                    for name, table in _TABLES.items()
                }
                merged = in_turns(merges, number)
                log(", ".join(f"{name} {seconds:.1f} s" for name, (seconds, _) in merged.items()))
                if number >= _WARM_UP:
                    for name, (seconds, _) in merged.items():
                        taken[name].append(seconds)
        finally:
            spark.stop()
    yield Result.of("merge_arrays_typed_vs_text", taken["typed"], taken["text"], "s")
