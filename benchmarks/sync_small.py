"""A `pgcdc sync` of ten changed rows, with a warm Spark Connect server and without a server.

Both sides merge into the same tables, in turns, each after an update of ten rows. Without a server,
each sync starts a JVM. The server is that of `pgcdc spark start`, after one merge. `process` is the
time for the start and the end of the interpreter.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg2

from benchmarks import workload
from benchmarks.results import Result
from benchmarks.source import log, source
from benchmarks.sync import sync_once
from benchmarks.sync_definitions import NAMES
from benchmarks.turns import in_turns
from pgcdc_assets.spark.server import SparkServer

REPETITIONS = 3
_ROWS = 10
_CHANGES = 40_000
_NAME = NAMES[0]

_UPDATE = "update orders set status = 'changed', updated_at = now() where id between %s and %s"


def run() -> Iterator[Result]:
    """Measure the wall time of both, and the parts of it."""
    with TemporaryDirectory(prefix="pgcdc-bench-sync-small-") as folder:
        root = Path(folder)
        (root / "dagster").mkdir()
        embedded = {
            "PGCDC_LAKE": str(root / "lake"),
            "DAGSTER_HOME": str(root / "dagster"),
            "PGCDC_SPARK_REMOTE": "local",
        }

        def prepare(conn: psycopg2.extensions.connection) -> int:
            embedded["PGCDC_DSN"] = conn.dsn
            return workload.run(conn, _CHANGES)

        with source(prepare), SparkServer(root / "state").running(log) as server:
            on_server = {**embedded, "PGCDC_SPARK_REMOTE": server.remote}
            sync_once(_NAME, on_server, root)
            parts: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
            # The workload deletes the first orders.
            firsts = itertools.count(5_001, _ROWS)

            def update_and_sync(environment: Mapping[str, str]) -> dict[str, float]:
                _update(embedded["PGCDC_DSN"], next(firsts))
                return sync_once(_NAME, environment, root, _ROWS)

            sides = {
                "server": partial(update_and_sync, on_server),
                "embedded": partial(update_and_sync, embedded),
            }
            # The first round is a warm-up.
            for number in range(REPETITIONS + 1):
                for kind, seconds in in_turns(sides, number).items():
                    log(f"{kind}: " + ", ".join(f"{p} {s:.1f} s" for p, s in seconds.items()))
                    if number > 0:
                        for part, taken in seconds.items():
                            parts[part, kind].append(taken)
    yield Result.against_limit("sync_small_server", parts["whole", "server"], 4, "s")
    yield Result.against_limit("sync_small_embedded", parts["whole", "embedded"], 12, "s")
    yield Result.of(
        "sync_small_server_vs_embedded", parts["whole", "server"], parts["whole", "embedded"], "s"
    )
    for part in ("start_up", "sensors", "capture", "session", "merge", "process"):
        yield Result.of(
            f"sync_small_{part}_server_vs_embedded",
            parts[part, "server"],
            parts[part, "embedded"],
            "s",
        )


def _update(dsn: str, first: int) -> None:
    with closing(psycopg2.connect(dsn)) as conn, conn, conn.cursor() as cursor:
        cursor.execute("set local synchronous_commit = on")
        cursor.execute(_UPDATE, (first, first + _ROWS - 1))
