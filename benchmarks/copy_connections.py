"""Snapshots over 1, 2 and 4 connections, beside as many COPY statements with discarded rows.

Both workloads use one embedded server over loopback TCP: a large table, which the connections share
by ranges of pages, and a hundred small tables. Each side is a process, which is timed from its
first connection, without the start of the process:

`ours`: the snapshot's pool of connections, with every row landed in the raw zone.
`sink`: a COPY of the same ranges or tables on as many connections, whose rows the
driver discards.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from psycopg2 import sql

from benchmarks.copied_orders import ORDERS, Discarded
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.source import log
from benchmarks.turns import in_turns
from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotPool, SnapshotReport
from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.postgres.catalog.relations import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.ranges import read_page_counts
from pgcdc_assets.postgres.copy.reader import Pages, rows_of
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy

REPETITIONS = 3
CONNECTIONS = (1, 2, 4)
LARGE, SMALL = "large", "small"

_ROWS = scaled(5_000_000)
_SMALL_TABLES = 100
_SMALL_ROWS = scaled(10_000)
_RANGE_BYTES = 64 * 1024 * 1024


def _tables(settings: ConnectionSettings, publication: str) -> list[PublishedTable]:
    with query_connection(settings, "bench") as conn:
        return published_tables(conn, publication)


def _ours(settings: ConnectionSettings, publication: str, connections: int) -> int:
    tables = _tables(settings, publication)
    policy = SnapshotPolicy(connections, _RANGE_BYTES)
    rows = 0
    with (
        TemporaryDirectory(prefix="pgcdc-bench-lake-") as folder,
        create_slot(settings, "benchmark", temporary=True) as snapshot,
    ):
        zone = RawZone(Lake(folder), "bench")
        for outcome in SnapshotPool(settings, zone, 1, snapshot, policy).copy(tables):
            if isinstance(outcome, SnapshotFailure):
                raise outcome.error
            assert isinstance(outcome, SnapshotReport)
            rows += outcome.row_count
    return rows


def _sink(settings: ConnectionSettings, publication: str, connections: int) -> int:
    tables = _tables(settings, publication)
    with query_connection(settings, "bench") as conn:
        pages = read_page_counts(conn, tables)
    statements = []
    for table in tables:
        count = pages[table.relation.relation_id]
        step = max(1, -(-count // connections)) if publication == LARGE else count + 1
        for start in range(0, max(1, count), step):
            query = rows_of(table.relation, False, None, Pages(start, start + step))
            statements.append(sql.SQL("copy ({}) to stdout").format(query))

    def run(mine: Sequence[sql.Composed]) -> int:
        nothing = Discarded()
        with (
            query_connection(settings, "bench", statement_timeout_ms=0) as conn,
            conn.cursor() as cursor,
        ):
            for statement in mine:
                cursor.copy_expert(statement, nothing)
        return nothing.rows

    with ThreadPoolExecutor(connections) as threads:
        return sum(threads.map(run, [statements[i::connections] for i in range(connections)]))


def _run_side(side: str, conninfo: str, publication: str, connections: str) -> dict[str, float]:
    call = {"ours": _ours, "sink": _sink}[side]
    began = time.perf_counter()
    rows = call(ConnectionSettings(conninfo, "bench"), publication, int(connections))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rows": rows, "rows_per_second": rows / seconds, "rss_mb": peak}


def _in_process(side: str, conninfo: str, publication: str, connections: int) -> dict[str, float]:
    arguments = [side, conninfo, publication, str(connections)]
    command = [sys.executable, "-m", "benchmarks.copy_connections", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def run() -> Iterator[Result]:
    """Measure both workloads."""
    with TemporaryDirectory(prefix="pgcdc-bench-copies-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        server = EmbeddedServer(Path(folder) / "data", 18, UNSAFE_BUT_FAST)
        try:
            conninfo = server.start().conninfo()
            _make_tables(ConnectionSettings(conninfo, "bench"))
            yield from _measure(conninfo, LARGE, "table_copy", _ROWS)
            yield from _measure(conninfo, SMALL, "hundred_tables_copy", _SMALL_TABLES * _SMALL_ROWS)
        finally:
            server.remove()


def _measure(conninfo: str, publication: str, name: str, rows: int) -> Iterator[Result]:
    sides = {
        (side, count): partial(_in_process, side, conninfo, publication, count)
        for count in CONNECTIONS
        for side in ("ours", "sink")
    }
    by_label = {f"{side} {count}": call for (side, count), call in sides.items()}
    samples: dict[str, list[dict[str, float]]] = {label: [] for label in by_label}
    for number in range(REPETITIONS):
        for label, found in in_turns(by_label, number).items():
            if found["rows"] != rows:
                raise SystemExit(f"{label} copied {found['rows']:.0f} rows of {rows}")
            samples[label].append(found)
            log(
                f"{publication} {label:7} {found['rows_per_second'] / 1e3:6.0f} k rows/s"
                f"  memory {found['rss_mb']:.0f} MB"
            )
    speed = {label: [one["rows_per_second"] for one in series] for label, series in samples.items()}
    for count in CONNECTIONS:
        plural = "connection" if count == 1 else "connections"
        yield Result.of(
            f"{name}_{count}_{plural}_vs_copy_to_nothing",
            speed[f"ours {count}"],
            speed[f"sink {count}"],
            "rows/s",
        )
    yield Result.of(f"{name}_4_connections_vs_1", speed["ours 4"], speed["ours 1"], "rows/s")
    memory = [one["rss_mb"] for one in samples["ours 4"]]
    yield Result.reported(f"{name}_4_connections_peak_memory", memory, "MB")


def _make_tables(settings: ConnectionSettings) -> None:
    names = [f"small_{number:03}" for number in range(_SMALL_TABLES)]
    statements = [ORDERS.format(name="orders", rows=_ROWS)]
    statements += [ORDERS.format(name=name, rows=_SMALL_ROWS) for name in names]
    statements += [
        f"create publication {LARGE} for table orders",
        f"create publication {SMALL} for table {', '.join(names)}",
        "vacuum analyze",
    ]
    with query_connection(settings, "bench", statement_timeout_ms=0) as conn:
        for statement in statements:
            with conn.cursor() as cursor:
                cursor.execute("set search_path = public")
                cursor.execute(statement)


if __name__ == "__main__":
    print(json.dumps(_run_side(*sys.argv[1:])))
