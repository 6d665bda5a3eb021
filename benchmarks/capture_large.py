"""Capture of one transaction of five million rows, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import workload
from benchmarks.capture import measure
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.source import source

ROWS = scaled(5_000_000)
# Each side comes first once.
REPETITIONS = 2
_RSS_LIMIT_MB = 700.0


def run() -> Iterator[Result]:
    """Measure both sides, whole processes."""
    with source(lambda conn: workload.run_one_transaction(conn, ROWS)) as source_server:
        measured = measure(source_server, "loopback TCP", repetitions=REPETITIONS)
    yield measured.rate("large_transaction_vs_pg_recvlogical")
    yield measured.memory("large_transaction_peak_memory", _RSS_LIMIT_MB)
