"""Capture to the durable commit, beside pg_recvlogical, which writes the stream to a file.

Both sides read copies of one slot, in turns, with text values. Both are timed as whole processes
from fork to exit. Our time includes the start of the interpreter and its imports.
`capture_without_start` is our time from the first connection to the confirmed slot, as in a process
that captures many windows. `capture_waiting` is the share of this time in which the capture waited
for messages of the server: a further thread could not use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from benchmarks import workload
from benchmarks.capture_wire import measure_alone
from benchmarks.results import FIRST, Result
from benchmarks.source import CaptureUsage, Source, log, source
from benchmarks.turns import in_turns

REPETITIONS = 5
_CPU_LIMIT = 4.0
_RSS_LIMIT_MB = 600.0
_PG_RECVLOGICAL, _CAPTURE = "pg_recvlogical", "capture"


def run() -> Iterator[Result]:
    """Measure over loopback TCP and over the Unix socket."""
    with source(workload.run) as source_server:
        measured = measure(source_server, "loopback TCP")
        yield measured.rate(FIRST)
        yield measured.rate_without_start("capture_without_start")
        yield measured.waiting("capture_waiting")
        yield measured.cpu("capture_cpu_vs_pg_recvlogical")
        yield measured.cpu_against_limit("capture_cpu_per_million_changes")
        yield measured.memory("capture_peak_memory")
        measured = measure(source_server, "Unix socket", unix_socket=True)
        yield measured.rate("capture_vs_pg_recvlogical_unix_socket")
        yield measured.waiting("capture_waiting_unix_socket")
        yield measure_alone(
            "unix_socket_stream_alone_vs_walsender", source_server, unix_socket=True
        )


def measure(
    server: Source,
    place: str,
    *,
    unix_socket: bool = False,
    repetitions: int = REPETITIONS,
    others: Mapping[str, Callable[[], CaptureUsage]] | None = None,
) -> Comparison:
    """Read the stream by both sides, and by other sides, in turns."""
    comparison = Comparison(server.changes)
    sides: dict[str, Callable[[], CaptureUsage]] = {
        _PG_RECVLOGICAL: partial(server.pg_recvlogical, unix_socket=unix_socket),
        _CAPTURE: partial(server.capture, unix_socket=unix_socket),
        **(others or {}),
    }
    for number in range(repetitions):
        taken = in_turns(sides, number)
        for side, usage in taken.items():
            comparison.usages[side].append(usage)
        log(f"{place}: " + "; ".join(f"{side} {usage}" for side, usage in taken.items()))
    return comparison


class Comparison:
    """The usage of all sides in each repetition.

    Args:
        changes: number of changes in each repetition.
    """

    def __init__(self, changes: int) -> None:
        self.usages: defaultdict[str, list[CaptureUsage]] = defaultdict(list)
        self._changes = changes

    def rate(self, name: str, baseline: str = _PG_RECVLOGICAL) -> Result:
        """Compare changes per second of whole processes."""
        ours, theirs = (
            [self._changes / usage.seconds for usage in self.usages[side]]
            for side in (_CAPTURE, baseline)
        )
        return Result.of(name, ours, theirs, "changes/s")

    def rate_without_start(self, name: str) -> Result:
        """Report our changes per second without the start and the end of the process."""
        rates = [self._changes / usage.seconds_without_start for usage in self.usages[_CAPTURE]]
        return Result.reported(name, rates, "changes/s")

    def waiting(self, name: str) -> Result:
        """Report our share of time in which the next messages had not arrived."""
        shares = [u.waiting_seconds / u.seconds_without_start for u in self.usages[_CAPTURE]]
        return Result.reported(name, shares, "of the time")

    def cpu(self, name: str, baseline: str = _PG_RECVLOGICAL) -> Result:
        """Compare the CPU of whole processes."""
        ours, theirs = (self._cpu(side) for side in (_CAPTURE, baseline))
        return Result.of(name, ours, theirs, "s per million changes")

    def cpu_against_limit(self, name: str) -> Result:
        """Compare our CPU with its limit."""
        return Result.against_limit(name, self._cpu(_CAPTURE), _CPU_LIMIT, "s of the whole process")

    def memory(self, name: str, limit_mb: float = _RSS_LIMIT_MB) -> Result:
        """Compare our peak memory with its limit."""
        peaks = [usage.peak_mb for usage in self.usages[_CAPTURE]]
        return Result.against_limit(name, peaks, limit_mb, "MB")

    def _cpu(self, side: str) -> list[float]:
        return [usage.cpu_seconds * 1e6 / self._changes for usage in self.usages[side]]
