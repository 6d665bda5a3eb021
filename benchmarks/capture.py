"""Capture to the durable commit against pg_recvlogical writing the same stream to a file.

Both read copies of one slot, in turns, with text values; medians. Ours counts from the first
connection to the confirmed slot, in a process that has imported its modules; pg_recvlogical from
its start to its end.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import workload
from benchmarks.results import FIRST, Result
from benchmarks.source import log, source

REPETITIONS = 5
_CPU_LIMIT = 7.0
_RSS_LIMIT_MB = 600.0


def run() -> Iterator[Result]:
    """Measure loopback TCP and the Unix socket."""
    with source(workload.run) as source_server:
        for unix_socket, name, place in (
            (False, FIRST, "loopback TCP"),
            (True, "capture_vs_pg_recvlogical_unix_socket", "Unix socket"),
        ):
            ours, theirs, cpu, rss = [], [], [], []
            for _ in range(REPETITIONS):
                baseline = source_server.pg_recvlogical(unix_socket=unix_socket)
                measured = source_server.capture(unix_socket=unix_socket)
                theirs.append(source_server.changes / baseline)
                ours.append(source_server.changes / measured["seconds"])
                cpu.append(measured["process_cpu_seconds"] * 1e6 / source_server.changes)
                rss.append(measured["peak_rss_mb"])
                log(
                    f"{place}: pg_recvlogical {theirs[-1]:,.0f}/s, capture {ours[-1]:,.0f}/s with "
                    f"{cpu[-1]:.1f} s of CPU per million and {rss[-1]:.0f} MB"
                )
            yield Result.of(name, ours, theirs, "changes/s")
            if not unix_socket:
                yield Result.against_limit(
                    "capture_cpu_per_million_changes", cpu, _CPU_LIMIT, "s of the whole process"
                )
                yield Result.against_limit("capture_peak_memory", rss, _RSS_LIMIT_MB, "MB")
