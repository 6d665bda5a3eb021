"""Methods to read messages from the connection: the CPU of the walsender and of the reader.

The messages are counted and discarded. The walsender's CPU is the most important figure, because
the walsender's core limits a capture.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks import workload
from benchmarks.results import Result
from benchmarks.source import Source, log, source
from benchmarks.turns import in_turns
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.stream import start as stream_start
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.libpq_transport import LibpqWire
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.socket_transport import SocketWire
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.protocol.frames import MessageBatch

REPETITIONS = 3
_TICKS_PER_SECOND = 100
_PARTS = ("time", "client_cpu", "walsender_cpu")
_Taken = tuple[float, float, float]

_WAYS = {
    "libpq_eager": (LibpqWire, WireSettings(pause_seconds=0, busy_bytes=1)),
    "libpq_pauses_20ms": (LibpqWire, WireSettings()),
    "socket_eager": (SocketWire, WireSettings(pause_seconds=0, busy_bytes=1)),
    "socket_pauses_5ms": (SocketWire, WireSettings(pause_seconds=0.005)),
    "socket_pauses_10ms": (SocketWire, WireSettings(pause_seconds=0.01)),
    "socket_pauses_20ms": (SocketWire, WireSettings()),
    "socket_pauses_40ms": (SocketWire, WireSettings(pause_seconds=0.04)),
}


def run() -> Iterator[Result]:
    """Measure each method over loopback TCP."""
    with source(workload.run) as source_server:
        measured: dict[str, list[_Taken]] = {way: [] for way in _WAYS}
        sides = {
            way: partial(_read_by, kind, source_server, settings)
            for way, (kind, settings) in _WAYS.items()
        }
        for number in range(REPETITIONS):
            for way, taken in in_turns(sides, number).items():
                measured[way].append(taken)
                log(
                    f"{way}: {taken[0]:.2f} s, CPU of the client {taken[1]:.2f} s, "
                    f"of the walsender {taken[2]:.2f} s"
                )
        for way, figures in measured.items():
            for part, series in zip(_PARTS, zip(*figures, strict=True), strict=True):
                yield Result.reported(f"wire_{way}_{part}", series, "s")


def measure_alone(name: str, source_server: Source, *, unix_socket: bool = False) -> Result:
    """Compare the seconds of a reader that discards the stream with the CPU of the walsender.

    With a ratio of 1 the walsender's core is busy all the time: no client is faster.
    """
    conninfo = source_server.conninfo(unix_socket=unix_socket)
    taken = [_read(source_server, conninfo, WireSettings()) for _ in range(REPETITIONS)]
    seconds, _, walsender = zip(*taken, strict=True)
    return Result.of(name, seconds, walsender, "s")


def _read_by(kind: type, source_server: Source, settings: WireSettings) -> _Taken:
    with mock.patch.object(stream_start, "SocketWire", kind):
        return _read(source_server, source_server.conninfo(), settings)


def _read(source_server: Source, conninfo: str, settings: WireSettings) -> _Taken:
    """Read the whole stream once. Return seconds, CPU of the reader and CPU of the walsender."""
    connection = ConnectionSettings(conninfo=conninfo, name="bench")
    with source_server.slot() as slot:
        began, cpu = time.monotonic(), time.process_time()
        with ReplicationStream(
            connection,
            slot,
            workload.PUBLICATION,
            source_server.start,
            StreamSettings(wire=settings),
        ) as reading:
            for batch in reading.batches():
                if _has_reached(batch, int(source_server.end)):
                    break
            walsender = _cpu_seconds(reading.backend_pid)
            return time.monotonic() - began, time.process_time() - cpu, walsender


def _has_reached(batch: MessageBatch, end: int) -> bool:
    keepalives = batch.starts[batch.buffer[batch.starts] == ord("k")]
    return any(
        int.from_bytes(batch.buffer[start + 1 : start + 9].tobytes(), "big") >= end
        for start in np.asarray(keepalives).tolist()
    )


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
