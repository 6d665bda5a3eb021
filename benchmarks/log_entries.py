"""Opening an SCD table with many log entries, of merges at a constant pace over a week or longer.

The log is simulated: small commits of one file each, which replaces the file before, and one
checkpoint near the end, as the maintenance and the merges leave it. The checkpoint has the removals
of the last day. No reader needs the entries before that day: they are links to a few files, because
ten million files do not fit on most disks. Spark is not needed: states and watermarks are read by
delta-rs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.source import log
from pgcdc_assets.raw.delta.log_entries import FOLDER
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.state import open_table, read_scd_state

NAME = "shop"
SIZES = tuple(
    scaled(size, least=10 + number)
    for number, size in enumerate((10_000, 17_280, 100_000, 200_000, 1_000_000, 10_000_000))
)
LIMITED, LIMIT_SECONDS = SIZES[3], 0.05
REPETITIONS = 5
# After the last checkpoint, as on average between two.
_UNCOVERED = 5
# The maintenance keeps log entries for a week, and removals in checkpoints for a day. Longer logs
# are of a table whose owner keeps entries for longer.
_LOG_DAYS = 7
_DAY_ENTRIES = scaled(1_000_000 // _LOG_DAYS, least=3)
# ext4 allows 65,000 links to a file.
_LINKS = 60_000


def run() -> Iterator[Result]:
    """Measure each size of the log in a process that has opened no table yet."""
    for entries in SIZES:
        with roomy_folder("log-entries", 5) as folder:
            lake = Lake(str(folder))
            path = lake.path(NAME, "scd1", "shop", "orders")
            began = time.monotonic()
            make_table(path, entries)
            log(f"{entries:,} entries were written in {time.monotonic() - began:.0f} s")
            # A reader that lists the log cannot be faster.
            listing = partial(_count_names, Path(path) / FOLDER)
            listed = [_seconds(listing) for _ in range(REPETITIONS)]
            yield _result(f"list_{entries}_log_entries", listed, entries)
            opening = partial(open_table, lake, path)
            reading = partial(read_scd_state, lake, NAME, path)
            opened = [_seconds(opening) for _ in range(REPETITIONS)]
            yield _result(f"open_table_of_{entries}_log_entries", opened, entries)
            log(f"{entries} entries: the first reading of the state took {_seconds(reading):.4f} s")
            again = [_seconds(reading) for _ in range(REPETITIONS)]
            yield _result(f"read_state_of_{entries}_log_entries", again, entries)


def make_table(path: str, entries: int) -> None:
    """Make a table of one small file with a log of so many commits, and a checkpoint near the end.

    No reader needs the entries before the last day. A first checkpoint, of the table's beginning,
    takes their place, so that the last one is made of the entries of a day.

    Args:
        path: a folder that does not exist.
        entries: number of commits.
    """
    write_deltalake(path, pa.table({"id": pa.array(range(1000), pa.int64())}))
    DeltaTable(path).create_checkpoint()
    folder = Path(path) / FOLDER
    first = [json.loads(line) for line in (folder / f"{0:020d}.json").read_text().splitlines()]
    add = next(action["add"] for action in first if "add" in action)
    of_a_day = min(entries // _LOG_DAYS, _DAY_ENTRIES)
    now, pause = int(time.time() * 1000), 86_400_000 / of_a_day
    begins = entries - of_a_day
    for version in range(1, begins):
        if version % _LINKS == 1:
            source = folder / f"{version:020d}.json"
            source.write_text(json.dumps({"commitInfo": {"operation": "WRITE"}}))
        else:
            os.link(source, folder / f"{version:020d}.json")
    for version in range(begins, entries):
        if version == begins:
            _move_checkpoint(folder, version - 1)
        at = round(now - (entries - version) * pause)
        actions = [
            {"commitInfo": {"timestamp": at, "operation": "WRITE", "operationParameters": {}}},
            {"txn": {"appId": f"pgcdc:{NAME}:1", "version": version, "lastUpdated": at}},
            {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": at}},
            {"add": {**add, "path": f"part-{version}.parquet"}},
        ]
        add = actions[-1]["add"]
        (folder / f"{version:020d}.json").write_text("\n".join(map(json.dumps, actions)))
        if version == entries - 1 - _UNCOVERED:
            DeltaTable(path).create_checkpoint()


def _move_checkpoint(folder: Path, version: int) -> None:
    """Make the checkpoint of the first commit that of another one."""
    (folder / f"{0:020d}.checkpoint.parquet").rename(folder / f"{version:020d}.checkpoint.parquet")
    last = folder / "_last_checkpoint"
    last.write_text(json.dumps({**json.loads(last.read_text()), "version": version}))


def _count_names(folder: Path) -> int:
    with os.scandir(folder) as names:
        return sum(1 for _ in names)


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _result(name: str, seconds: list[float], entries: int) -> Result:
    result = Result.reported(name, seconds, "s")
    if entries == LIMITED and name.startswith("open_"):
        result = Result.against_limit(name, seconds, LIMIT_SECONDS, "s")
    return replace(result, settings={"log entries": str(entries)})
