"""A complete `pgcdc sync` of the workload, without a running JVM, after a first sync.

Each repetition has a capture with a slot from before the workload. The first sync of a capture,
which creates slot, snapshots and empty tables, is not measured. The parts are from `pgcdc sync
--json`.
`process` is the remaining time of the process, for the start and the end of the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg2.extensions

from benchmarks import workload
from benchmarks.results import Result
from benchmarks.source import log, source
from benchmarks.sync_definitions import NAMES

_MODULE = "benchmarks.sync_definitions"


def run() -> Iterator[Result]:
    """Measure the wall time and its parts."""
    with TemporaryDirectory(prefix="pgcdc-bench-sync-") as folder:
        environment = {
            "PGCDC_LAKE": str(Path(folder, "lake")),
            "DAGSTER_HOME": str(Path(folder, "dagster")),
        }
        Path(environment["DAGSTER_HOME"]).mkdir()

        def prepare_and_work(conn: psycopg2.extensions.connection) -> int:
            environment["PGCDC_DSN"] = conn.dsn
            for name in NAMES:
                sync_once(name, environment, Path(folder))
            return workload.run(conn)

        with source(prepare_and_work) as server:
            parts: defaultdict[str, list[float]] = defaultdict(list)
            for name in NAMES:
                seconds = sync_once(name, environment, Path(folder), server.changes)
                log(f"{name}: " + ", ".join(f"{part} {s:.1f} s" for part, s in seconds.items()))
                for part, taken in seconds.items():
                    parts[part].append(taken)
    yield Result.reported("sync_cold", parts.pop("whole"), "s")
    for part, series in parts.items():
        yield Result.reported(f"sync_cold_{part}", series, "s")


def sync_once(
    name: str, environment: Mapping[str, str], folder: Path, changes: int | None = None
) -> dict[str, float]:
    """Run the command as a process, and return its parts and its total in seconds."""
    report_file = folder / "report.json"
    command = [sys.executable, "-m", "pgcdc_assets.cli", "sync", "-m", _MODULE]
    began = time.monotonic()
    finished = subprocess.run(
        [*command, "--name", name, "--json", str(report_file)],
        check=False,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    whole = time.monotonic() - began
    if finished.returncode != 0:
        raise SystemExit(finished.stdout)
    (report,) = json.loads(report_file.read_text())
    # The lag sensor may add another message.
    if changes is not None and report["change_count"] < changes:
        raise SystemExit(f"{report['change_count']} of {changes} changes were captured")
    seconds: dict[str, float] = report["seconds"]
    seconds["process"] = whole - sum(seconds.values())
    return {"whole": whole, **seconds}
