"""What the driver holds of a table of a billion rows: a simulation of its log.

Such a table has about 1,000 files of 128 MB, with the statistics that a merge writes. The log has
one add action for each file, and the rows do not exist. The state is read in a process of its own,
as a merge reads it, for tables of 1,000 and 10,000 files.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.transaction import AddAction, RemoveAction

from benchmarks.processes import run_measured
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.source import log
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.compaction import has_many_small_files
from pgcdc_assets.tables.fence import fence_app_id
from pgcdc_assets.tables.state import read_scd_state

SIZES = (scaled(1_000, least=10), scaled(10_000, least=20))
REPETITIONS = 5
NAME = "shop"
_FILE_ROWS, _FILE_BYTES = 1_000_000, 128 * 1024 * 1024
_COLUMNS = 12


def run() -> Iterator[Result]:
    """Measure seconds and memory of a state for each number of files."""
    for files in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            lake = Lake(folder)
            path = lake.path(NAME, "scd1", "shop", "orders")
            make_table(path, files)
            command = [sys.executable, "-m", "benchmarks.large_tables", folder, path]
            measured = [
                json.loads(run_measured(command).output.splitlines()[-1])
                for _ in range(REPETITIONS)
            ]
        rows = f"{measured[0]['rows']:,}"
        log(f"{files} files, {rows} rows: {measured}")
        for name, key, unit in (
            (f"read_state_of_{files}_files", "seconds", "s"),
            (f"state_of_{files}_files_memory", "megabytes", "MB"),
        ):
            result = Result.reported(name, [each[key] for each in measured], unit)
            yield replace(result, settings={"rows": rows})


def make_table(path: str, files: int) -> None:
    """Write the log of a table with so many files that do not exist.

    Args:
        path: a folder that does not exist.
    """
    names = [f"column_{n}" for n in range(_COLUMNS)]
    empty = {name: pa.array([], pa.int64()) for name in ["id", *names]}
    write_deltalake(path, pa.table(empty))
    table = DeltaTable(path)
    now = int(time.time() * 1000)
    added: list[AddAction | RemoveAction] = [
        AddAction(f"part-{n}.parquet", _FILE_BYTES, {}, now, True, _statistics(n, names))
        for n in range(files)
    ]
    table.create_write_transaction(
        added,
        "append",
        table.schema(),
        commit_properties=CommitProperties(app_transactions=[Transaction(fence_app_id(NAME), 0)]),
    )
    DeltaTable(path).create_checkpoint()


def _statistics(number: int, names: list[str]) -> str:
    least = {"id": number * _FILE_ROWS, **dict.fromkeys(names, 0)}
    most = {"id": (number + 1) * _FILE_ROWS - 1, **dict.fromkeys(names, 2**62)}
    return json.dumps(
        {
            "numRecords": _FILE_ROWS,
            "minValues": least,
            "maxValues": most,
            "nullCount": dict.fromkeys(least, 0),
        }
    )


def measure(folder: str, path: str) -> dict[str, float]:
    """Read the state of a table, and return the seconds and the growth of the process."""
    process = psutil.Process()
    before = process.memory_info().rss
    began = time.perf_counter()
    state = read_scd_state(Lake(folder), NAME, path)
    seconds = time.perf_counter() - began
    assert state is not None
    has_many_small_files(state.files)
    return {
        "seconds": seconds,
        "megabytes": (process.memory_info().rss - before) / 2**20,
        "rows": state.row_count or 0,
    }


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
