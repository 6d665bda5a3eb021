"""What the driver holds of a table of a billion rows: a simulation of its log.

Such a table has about 1,000 files of 128 MB, with the statistics that a merge writes. The log has
one add action for each file, and the rows do not exist. A part of the files has a deletion vector,
which does not exist either. The state is read in a process of its own, as a merge reads it, for
tables of 1,000 and 10,000 files.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from benchmarks.processes import run_measured
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.source import log
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta.log_entries import FOLDER
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.compaction import has_many_small_files
from pgcdc_assets.tables.fence import fence_transactions
from pgcdc_assets.tables.state import read_scd_state

SIZES = (scaled(1_000, least=10), scaled(10_000, least=20))
REPETITIONS = 5
NAME = "shop"
_FILE_ROWS, _FILE_BYTES = 1_000_000, 128 * 1024 * 1024
_COLUMNS = 12
_WATERMARK, _FENCE = Lsn(100), 7
# One in three files has deleted rows.
_FILES_PER_VECTOR, _DELETED_ROWS = 3, 1_000
# As Spark creates SCD tables.
_PROTOCOL = {
    "minReaderVersion": 3,
    "minWriterVersion": 7,
    "readerFeatures": ["deletionVectors"],
    "writerFeatures": ["deletionVectors", "invariants", "appendOnly"],
}


def run() -> Iterator[Result]:
    """Measure seconds and memory of a state for each number of files."""
    for files in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            lake = Lake(folder)
            path = lake.path(NAME, "scd1", "shop", "orders")
            make_table(lake, path, files)
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


def make_table(lake: Lake, path: str, files: int) -> None:
    """Write the log of a table with so many files that do not exist, with a checkpoint.

    Args:
        path: a folder that does not exist.
    """
    names = [f"column_{n}" for n in range(_COLUMNS)]
    empty = {name: pa.array([], pa.int64()) for name in ["id", *names]}
    write_deltalake(path, pa.table(empty))
    log_folder = Path(path) / FOLDER
    created = log_folder / f"{0:020d}.json"
    actions = [json.loads(line) for line in created.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            action["protocol"] = _PROTOCOL
        if "metaData" in action:
            action["metaData"]["configuration"] = {"delta.enableDeletionVectors": "true"}
    _write_commit(created, actions)
    now = int(time.time() * 1000)
    transactions = [
        {"txn": {"appId": each.app_id, "version": each.version, "lastUpdated": now}}
        for each in fence_transactions(RawZone(lake, NAME), 1, _WATERMARK, _FENCE)
    ]
    adds = [{"add": _add(n, names, now)} for n in range(files)]
    _write_commit(log_folder / f"{1:020d}.json", [*transactions, *adds])
    DeltaTable(path).create_checkpoint()


def _write_commit(file: Path, actions: Iterable[Mapping[str, Any]]) -> None:
    compact = (json.dumps(action, separators=(",", ":")) for action in actions)
    file.write_text("\n".join(compact))


def _add(number: int, names: list[str], now: int) -> dict[str, Any]:
    add = {
        "path": f"part-{number}.parquet",
        "partitionValues": {},
        "size": _FILE_BYTES,
        "modificationTime": now,
        "dataChange": True,
        "stats": _statistics(number, names),
    }
    if number % _FILES_PER_VECTOR == 0:
        add["deletionVector"] = {
            "storageType": "u",
            "pathOrInlineDv": f"{number:020d}",
            "offset": 1,
            "sizeInBytes": 40,
            "cardinality": _DELETED_ROWS,
        }
    return add


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
    assert state is not None and state.has_deletion_vectors
    has_many_small_files(state.files)
    return {
        "seconds": seconds,
        "megabytes": (process.memory_info().rss - before) / 2**20,
        "rows": state.row_count or 0,
    }


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
