"""The capture benchmark over TLS, on Debian's Postgres 15, because embedded servers have no SSL.

Three sides read copies of one slot, in turns: the capture and pg_recvlogical with
`sslmode=require`, and the capture with `sslmode=disable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks import workload
from benchmarks.capture import measure
from benchmarks.capture_wire import measure_alone
from benchmarks.results import Result
from benchmarks.source import source

_PLAIN = "capture without TLS"


def run() -> Iterator[Result]:
    """Measure loopback TCP with and without TLS."""
    with source(workload.run, version=15, tls=True) as source_server:
        plain = partial(source_server.capture, is_encrypted=False)
        measured = measure(source_server, "TLS", others={_PLAIN: plain})
        yield measure_alone("tls_stream_alone_vs_walsender", source_server)
    yield measured.rate("capture_tls_vs_pg_recvlogical")
    yield measured.rate_without_start("capture_tls_without_start")
    yield measured.rate("capture_tls_vs_tcp", _PLAIN)
    yield measured.waiting("capture_tls_waiting")
    yield measured.cpu("capture_cpu_tls_vs_pg_recvlogical")
    yield measured.cpu("capture_cpu_tls_vs_tcp", _PLAIN)
