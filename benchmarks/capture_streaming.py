"""Streamed transactions: the time from a large COMMIT to its durable rows, and the memory.

The session captures windows while the transaction runs, as a run that continues does. Before the
COMMIT, the server has decoded the whole transaction: with `stream.streaming: on` the client has
received and decoded its blocks, without streaming the server keeps the changes. The time is that
from the COMMIT to the end of the window's durable commit and confirmation. The sides take turns,
each with a new server and the same transaction. `parallel` differs from `on` only in the position
and the time of an abort, which the server adds (write_abort_info in
src/backend/replication/pgoutput/pgoutput.c).

The memory is that of a process that captures one transaction of five million rows, and one that
captures fifty transactions of 100,000 rows, which were open at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from tempfile import TemporaryDirectory

import psycopg2
import psycopg2.extensions

from benchmarks import workload
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.source import log, source
from benchmarks.turns import in_turns
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone

ROWS = scaled(5_000_000, least=1_000)
# Each side comes first once.
REPETITIONS = 3

_TRANSACTIONS = 50
_ROWS_EACH = scaled(100_000, least=1_000)
_RSS_LIMIT_MB = 700.0


def run() -> Iterator[Result]:
    """Measure the time of all sides, and the memory with streaming."""
    modes = ("on", "off", "parallel")
    sides = {mode: partial(_seconds, mode) for mode in modes}
    taken = [in_turns(sides, number) for number in range(REPETITIONS)]
    on, off, parallel = ([seconds[mode] for seconds in taken] for mode in modes)
    yield Result.of("large_transaction_commit_to_durable", on, off, "s")
    yield Result.of("large_transaction_parallel_vs_on", parallel, on, "s")
    yield _memory("streaming_peak_memory", lambda conn: workload.run_one_transaction(conn, ROWS))
    yield _memory(
        "streaming_50_transactions_peak_memory",
        lambda conn: workload.run_side_by_side(conn, _TRANSACTIONS, _ROWS_EACH),
    )


def _memory(name: str, work: Callable[[psycopg2.extensions.connection], int]) -> Result:
    """Compare the peak memory of captures of a workload with the limit."""
    with source(work) as source_server:
        usages = [source_server.capture(streaming="on") for _ in range(REPETITIONS)]
    for usage in usages:
        log(f"{name}: {usage}")
    return Result.against_limit(name, [usage.peak_mb for usage in usages], _RSS_LIMIT_MB, "MB")


def _write_nothing(_: psycopg2.extensions.connection) -> int:
    return 0


def _seconds(mode: str) -> float:
    """Return the seconds from the COMMIT to the end of the capture."""
    limits = CaptureLimits(stream=StreamSettings(plugin=PluginOptions(Streaming(mode))))
    with (
        source(_write_nothing) as source_server,
        closing(psycopg2.connect(source_server.conninfo())) as writer,
        closing(psycopg2.connect(source_server.conninfo())) as other,
        TemporaryDirectory(dir=source_server.folder) as lake,
        source_server.slot() as slot,
    ):
        other.autocommit = True
        settings = ConnectionSettings(conninfo=source_server.conninfo(), name="bench")
        zone = RawZone(Lake(lake), slot)
        source_server.record_epoch(zone, slot)
        with CaptureSession(settings, zone, slot, workload.PUBLICATION, limits) as session:
            workload.run_one_transaction(writer, ROWS)
            before = LsnWindow.of(1, source_server.start, _flush_lsn(other))
            session.land(before)
            began = time.monotonic()
            writer.commit()
            landed = session.land(LsnWindow.of(1, before.end, _flush_lsn(other)))
            seconds = time.monotonic() - began
            session.finish()
    if landed.row_count != ROWS:
        raise SystemExit(f"{landed.row_count} of {ROWS} rows were landed at the commit")
    log(f"streaming {mode}: {seconds:.2f} s from COMMIT to durable")
    return seconds


def _flush_lsn(conn: psycopg2.extensions.connection) -> Lsn:
    """Return the flushed position of the WAL, after a flush of everything earlier."""
    with conn.cursor() as cursor:
        cursor.execute("set synchronous_commit = on")
        # A commit flushes earlier WAL only if it wrote WAL itself: a change of the catalog does.
        cursor.execute("create temporary table flushed ()")
        cursor.execute("drop table flushed")
        cursor.execute("select pg_current_wal_flush_lsn()::text")
        ((lsn,),) = cursor.fetchall()
    return Lsn.parse(lsn)
