"""The capture benchmark over TLS, on Debian's Postgres 15, because embedded servers have no SSL.

Both sides request encryption by `sslmode=require`. The capture then reads through libpq and not
from the socket.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import workload
from benchmarks.capture import measure
from benchmarks.results import Result
from benchmarks.source import source


def run() -> Iterator[Result]:
    """Measure loopback TCP with TLS."""
    with source(workload.run, version=15, tls=True) as source_server:
        measured = measure(source_server, "TLS")
    yield measured.rate("capture_vs_pg_recvlogical_tls")
    yield measured.cpu("capture_cpu_vs_pg_recvlogical_tls")
