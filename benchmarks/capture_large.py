"""One transaction of five million rows: it must pass through in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import workload
from benchmarks.results import Result
from benchmarks.source import log, source

ROWS = 5_000_000
_RSS_LIMIT_MB = 700.0


def run() -> Iterator[Result]:
    """Measure once: its memory is what counts."""
    with source(lambda conn: workload.run_one_transaction(conn, ROWS)) as source_server:
        baseline = source_server.pg_recvlogical()
        measured = source_server.capture()
        log(f"pg_recvlogical {baseline:.1f} s, capture {measured}")
        yield Result.of(
            "large_transaction_vs_pg_recvlogical",
            [ROWS / measured["seconds"]],
            [ROWS / baseline],
            "changes/s",
        )
        yield Result.against_limit(
            "large_transaction_peak_memory", [measured["peak_rss_mb"]], _RSS_LIMIT_MB, "MB"
        )
