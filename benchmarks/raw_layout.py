"""Measure the file layout of the raw zone and simpler alternatives.

    .venv/bin/python benchmarks/raw_layout.py [write] [tables] [windows] [--rows N]

`write`: 800,000 decoded changes of two tables to the durable commit: CPU, peak memory, size.
`tables`: 100 tables mixed in one window: CPU, peak memory and files to write them, bytes and CPU
to read one of them.
`windows`: 10,000 windows of 20 changes: CPU per landing, log, files, with and without maintenance.

Every case runs in a separate process. The figures are in docs/decisions (raw zone by delta-rs).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.raw import schema
from pgcdc_assets.raw.delta import files, table
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.zone import RawZone

BATCH_ROWS = 32_768
START = 0x1_0000_0000
WINDOW = LsnWindow.of(1, START, START + (1 << 40))
# Ten columns, about 220 bytes in total.
TUPLE = (
    "{row}",
    "{customer}",
    "shipped",
    "{cents}.25",
    "2026-03-01 12:00:00.123456+00",
    "2026-03-01 12:00:00.654321",
    '{{red,"dark blue",green}}',
    '{{"channel": "web", "number": {row}}}',
    "{noise}",
    "t",
)


def make_changes(path: Path, rows: int, tables: int) -> None:
    """Write decoded batches to an Arrow file, of two tables in turns or of many mixed tables."""
    random = np.random.default_rng(1)
    noise = random.bytes(1 << 18).hex()
    with pa.ipc.new_stream(str(path), schema.CHANGES) as sink:
        for first in range(0, rows, BATCH_ROWS):
            row = np.arange(first, min(rows, first + BATCH_ROWS))
            if tables == 2:
                relation = (row // 1000 % 16 == 15).astype(np.int64)
            else:
                relation = random.integers(0, tables, len(row))
            sink.write_batch(_batch(row, relation, noise))


def _batch(row: np.ndarray, relation: np.ndarray, noise: str) -> pa.RecordBatch:
    count = len(row)
    texts = [
        text.format(
            row=r, customer=r % 5000, cents=r * 37 % 99991, noise=noise[r * 7919 % 500_000 :][:90]
        )
        for r in row.tolist()
        for text in TUPLE
    ]
    offsets = pa.array(np.arange(count + 1) * len(TUPLE), pa.int32())
    lists = schema.CHANGES.field("new").type
    transaction = row // 1000
    known = {
        "epoch": pa.repeat(pa.scalar(1, pa.int32()), count),
        "window": pa.repeat(WINDOW.key, count),
        "commit_lsn": pa.array(START + transaction * 250_000),
        "ordinal": pa.array(row % 1000),
        "xid": pa.array(700 + transaction),
        "commit_ts": pa.array(1_770_000_000_000_000 + transaction * 3_000),
        "op": pa.array(np.array(list("IIIIIIIIIIIUUUUD"), dtype=object)[row % 16]),
        "relation_id": pa.array(16_400 + relation),
        "relation_version": pa.repeat(pa.scalar(1, pa.int32()), count),
        "schema": pa.repeat("public", count),
        "table": pa.array([f"table_{number:03d}" for number in relation]),
        "new": pa.ListArray.from_arrays(offsets, pa.array(texts, pa.large_string()), type=lists),
    }
    arrays = [known.get(f.name, pa.nulls(count)).cast(f.type) for f in schema.CHANGES]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.CHANGES)


def read_changes(path: Path) -> Iterator[pa.RecordBatch]:
    """Read each batch into separate memory, as a decoder does."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        yield from stream


# Each case runs in a separate process, with the file of changes and an empty folder.


def read_only(changes: Path, lake: Path) -> None:
    """Only read the batches. All other cases include this work."""
    for _ in read_changes(changes):
        pass


def ours(changes: Path, lake: Path) -> None:
    """Land the window as the package does."""
    RawZone(Lake(str(lake)), "bench").changes.land(WINDOW, read_changes(changes))


def ours_lz4(changes: Path, lake: Path) -> None:
    """Land the window with LZ4."""
    with mock.patch.multiple(files, COMPRESSION="lz4", COMPRESSION_LEVEL=None):
        ours(changes, lake)


def ours_snappy(changes: Path, lake: Path) -> None:
    """Land the window with Snappy."""
    with mock.patch.multiple(files, COMPRESSION="snappy", COMPRESSION_LEVEL=None):
        ours(changes, lake)


def _delta_rs(
    changes: Path, lake: Path, *, row_group_rows: int | None = None, partition_by: str | None = None
) -> None:
    reader = pa.RecordBatchReader.from_batches(schema.CHANGES, read_changes(changes))
    write_deltalake(
        str(lake / "bench" / "raw" / "changes"),
        reader,
        mode="append",
        writer_properties=WriterProperties(compression="SNAPPY", max_row_group_size=row_group_rows),
        commit_properties=CommitProperties(app_transactions=[Transaction("bench", 1)]),
        partition_by=partition_by,
    )


def delta_rs_snappy(changes: Path, lake: Path) -> None:
    """Write the stream by write_deltalake with default settings."""
    _delta_rs(changes, lake)


def delta_rs_small_groups(changes: Path, lake: Path) -> None:
    """Write the stream with row groups of 64 k rows."""
    _delta_rs(changes, lake, row_group_rows=65_536)


def delta_rs_partitioned(changes: Path, lake: Path) -> None:
    """Write the stream partitioned by source table."""
    _delta_rs(changes, lake, partition_by="table")


CASES = {
    case.__name__: case
    for case in (
        read_only,
        ours,
        ours_lz4,
        ours_snappy,
        delta_rs_snappy,
        delta_rs_small_groups,
        delta_rs_partitioned,
    )
}


def run_case(name: str, changes: Path) -> dict[str, float]:
    """Run one case in a child process, which measures itself."""
    with tempfile.TemporaryDirectory() as lake:
        command = [sys.executable, __file__, "--case", name, str(changes), lake]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        figures: dict[str, float] = json.loads(done.stdout)
        folder = Path(lake) / "bench" / "raw" / "changes"
        if folder.exists():
            figures |= measure_table(str(folder))
    return figures


def child(name: str, changes: str, lake: str) -> None:
    """Run a case, and print the CPU and memory of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    CASES[name](Path(changes), Path(lake))
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # ru_maxrss is unsuitable, because a child process inherits it from its parent.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rss_mb = int(status["VmHWM"].split()[0]) / 1024
    json.dump({"cpu": cpu, "seconds": seconds, "rss_mb": rss_mb}, sys.stdout)


def measure_table(uri: str) -> dict[str, float]:
    """Measure size, files, and the read of one source table's rows."""
    files = DeltaTable(uri).file_uris()
    wanted, total, touched = "table_001", 0, 0
    for file in files:
        footer = pq.ParquetFile(file).metadata
        names = [footer.schema.column(i).path for i in range(footer.num_columns)]
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            size = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
            total += size
            if "table" in names:
                found = group.column(names.index("table")).statistics
                touched += size if found.min <= wanted <= found.max else 0
            else:
                touched += size if f"table={wanted}" in file else 0
    started = time.process_time()
    dataset = DeltaTable(uri).to_pyarrow_dataset()
    rows = dataset.to_table(columns=["new"], filter=pc.field("table") == wanted).num_rows
    cpu = time.process_time() - started
    return {
        "files": len(files),
        "size_mb": total / 2**20,
        "one_table_mb": touched / 2**20,
        "one_table_cpu": cpu,
        "one_table_rows": rows,
    }


def bench_cases(rows: int, tables: int, names: list[str], repetitions: int) -> None:
    """Run the cases on one workload and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        changes = Path(folder) / "changes.arrow"
        make_changes(changes, rows, tables)
        print(
            f"\n{rows:,} changes of {tables} tables, "
            f"{changes.stat().st_size / 2**20:.0f} MB in memory, medians of {repetitions}"
        )
        print(
            "| case | CPU s per million | seconds | peak RSS MB | size MB | files "
            "| read of one table: MB | CPU s |\n|---|--:|--:|--:|--:|--:|--:|--:|"
        )
        # Run the cases in turns, so that a busy minute of the machine affects all cases.
        runs = [{name: run_case(name, changes) for name in names} for _ in range(repetitions)]
        for name in names:
            f = {key: statistics.median(run[name][key] for run in runs) for key in runs[0][name]}
            cells = [f["cpu"] * 1e6 / rows, f["seconds"], f["rss_mb"]]
            cells += [f.get(n, 0) for n in ("size_mb", "files", "one_table_mb", "one_table_cpu")]
            print("| " + " | ".join([name.replace("_", " "), *(f"{c:.2f}" for c in cells)]) + " |")


def land_windows(lake: Path, windows: int, is_maintained: bool) -> dict[str, float]:
    """Land many windows of 20 changes of five tables, and measure the last tenth."""
    # Log entries expire at once. By default they expire after a day.
    table._PROPERTIES["delta.logRetentionDuration"] = "interval 1 second"
    zone = RawZone(Lake(str(lake)), "bench")
    numbers = np.arange(20)
    some = _batch(numbers, numbers % 5, np.random.default_rng(1).bytes(1 << 18).hex())
    position = schema.CHANGES.get_field_index("commit_lsn")
    measured = max(1, windows // 10)
    landing = maintaining = 0.0
    for number in range(windows):
        lsn = pa.array([START + number] * some.num_rows, pa.int64())
        rows = some.set_column(position, schema.CHANGES.field(position), lsn)
        started = time.process_time()
        zone.changes.land(LsnWindow.of(1, START + number, START + number + 1), [rows])
        landed = time.process_time()
        if is_maintained:
            maintain_raw_zone(zone)
        if number >= windows - measured:
            landing += landed - started
            maintaining += time.process_time() - landed
    folder = Path(zone.changes.table.uri)
    log = list((folder / "_delta_log").iterdir())
    started = time.perf_counter()
    found = len(zone.changes.windows(1))
    assert found == windows
    return {
        "landing_ms": landing / measured * 1e3,
        "maintenance_ms": maintaining / measured * 1e3,
        "files": len(DeltaTable(str(folder)).file_uris()),
        "log_entries": len(log),
        "log_mb": sum(entry.stat().st_size for entry in log) / 2**20,
        "list_windows_ms": (time.perf_counter() - started) * 1e3,
        "one_table_cpu_ms": measure_table(str(folder))["one_table_cpu"] * 1e3,
    }


def bench_windows(windows: int) -> None:
    """Land the windows without and with maintenance after each window, and print a table."""
    print(f"\n{windows:,} windows of 20 changes of five tables; the last tenth of them is timed")
    print(
        "| maintenance | CPU ms to land one | CPU ms of it per window | live files | log entries "
        "| log MB | ms to list all windows | CPU ms to read one table |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    for is_maintained in (False, True):
        with tempfile.TemporaryDirectory() as lake:
            figures = land_windows(Path(lake), windows, is_maintained)
        cells = [f"{figure:,.1f}".removesuffix(".0") for figure in figures.values()]
        print("| " + " | ".join(["yes" if is_maintained else "no", *cells]) + " |", flush=True)


def main() -> None:
    """Run the benchmarks of the command line, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["write", "tables", "windows"])
    parser.add_argument("--rows", type=int, default=800_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        return child(*options.case)
    plain = [name for name in CASES if name != "delta_rs_partitioned"]
    if "write" in options.parts:
        bench_cases(options.rows, 2, plain, options.repetitions)
    if "tables" in options.parts:
        bench_cases(options.rows, 100, list(CASES), options.repetitions)
    if "windows" in options.parts:
        bench_windows(options.windows)


if __name__ == "__main__":
    main()
