"""Opening an SCD table with many log entries: a merge every 5 s makes 17,280 a day.

The log is simulated: small commits of one file each, which replaces the file before, and the last
checkpoint. Spark is not needed: states and watermarks are read by delta-rs.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.source import log
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.state import open_table, read_scd_state

NAME = "shop"
SIZES = (scaled(1_000, least=10), scaled(17_280, least=20), scaled(200_000, least=30))
REPETITIONS = 5
# After the last checkpoint, as on average between two.
_UNCOVERED = 5
_BETWEEN_CHECKPOINTS = 5_000


def run() -> Iterator[Result]:
    """Measure each size of the log in a process that has opened no table yet."""
    for entries in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            lake = Lake(folder)
            path = lake.path(NAME, "scd1", "shop", "orders")
            make_table(path, entries)
            opening = partial(open_table, lake, path)
            reading = partial(read_scd_state, lake, NAME, path)
            opened = [_seconds(opening) for _ in range(REPETITIONS)]
            yield _result(f"open_table_of_{entries}_log_entries", opened, entries)
            log(f"{entries} entries: the first reading of the state took {_seconds(reading):.4f} s")
            again = [_seconds(reading) for _ in range(REPETITIONS)]
            yield _result(f"read_state_of_{entries}_log_entries", again, entries)


def make_table(path: str, entries: int) -> None:
    """Make a table of one small file with a log of so many commits, and a checkpoint near the end.

    Args:
        path: a folder that does not exist.
        entries: number of commits.
    """
    write_deltalake(path, pa.table({"id": pa.array(range(1000), pa.int64())}))
    folder = Path(path) / "_delta_log"
    first = [json.loads(line) for line in (folder / f"{0:020d}.json").read_text().splitlines()]
    add = next(action["add"] for action in first if "add" in action)
    now = int(time.time() * 1000)
    for version in range(1, entries):
        actions = [
            {"commitInfo": {"timestamp": now, "operation": "WRITE", "operationParameters": {}}},
            {"txn": {"appId": f"pgcdc:{NAME}:1", "version": version, "lastUpdated": now}},
            {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": now}},
            {"add": {**add, "path": f"part-{version}.parquet"}},
        ]
        add = actions[-1]["add"]
        text = "\n".join(map(json.dumps, actions))
        (folder / f"{version:020d}.json").write_text(text)
        # A checkpoint reads the commits since the last one.
        if version % _BETWEEN_CHECKPOINTS == 0 or version == entries - 1 - _UNCOVERED:
            DeltaTable(path).create_checkpoint()


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _result(name: str, seconds: list[float], entries: int) -> Result:
    result = Result.reported(name, seconds, "s")
    return replace(result, settings={"log entries": str(entries)})
