"""Small windows of one session: beside an open transaction, of one row, and of one second.

* `capture_beside_open_transaction`: the time of equal windows while another session has an open
  writing transaction, from which the server retains WAL, and without it. A session that starts a
  stream for each window decodes all of the retained WAL again; its times are reported as well.
* `capture_one_row_cpu`: CPU of the client for a window of one row.
* `raw_freshness_p95`: time from the commit in the source to the end of the window's commit in the
  raw zone, at 1,000 changes a second, with windows of one second by the rules of a run and with its
  maintenance. Source and client use the same clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import psycopg2
import psycopg2.extensions

from benchmarks import freshness_source, workload
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.source import Source, log, source
from pgcdc_assets.capture.report import CaptureReport
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.capture.snapshots.pool import SnapshotFailure
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.orchestration.runs.long_runs import poll_seconds
from pgcdc_assets.orchestration.sensors.next_window import Capture, CaptureProgress, plan_window
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.table_name import TableName

_WINDOWS = 5
_ROWS = scaled(100_000, least=2_000)
_RETAINED_BYTES = scaled(1024**3, least=16 * 1024**2)
_ONE_ROW_WINDOWS = 40
_SECONDS = scaled(120, least=20)
_POLICY = WindowPolicy(max_age_seconds=1.0)
_WARM_UP_SECONDS = 10
_CPU_LIMIT_MS = 60.0
_FRESHNESS_LIMIT = 1.5

_SCHEMA = f"""
    create table trickle (id int, v text);
    create table unpublished (id int, v text);
    alter publication {workload.PUBLICATION} set table trickle
"""
_INSERT = "insert into trickle select i, md5(i::text) from generate_series(1, %s) i"
# WAL that the server decodes and does not send, 1 KB a row.
_INSERT_UNPUBLISHED = """
    insert into unpublished select i, repeat(md5(i::text), 30) from generate_series(1, %s) i
"""


def run() -> Iterator[Result]:
    """Measure the three."""
    with source(_create_tables) as source_server:
        yield from _beside_open_transaction(source_server)
        yield _one_row(source_server)
    yield _freshness()


def _create_tables(conn: psycopg2.extensions.connection) -> int:
    with conn.cursor() as cursor:
        cursor.execute(_SCHEMA)
    return 0


class _Capture:
    """A capture of the source, whose windows have the changes of one statement each."""

    def __init__(self, source_server: Source, folder: str, slot: str) -> None:
        settings = ConnectionSettings(conninfo=source_server.conninfo(), name="bench")
        zone = RawZone(Lake(folder), slot)
        source_server.record_epoch(zone, slot)
        self.session = CaptureSession(settings, zone, slot, workload.PUBLICATION)
        self.single = partial(capture_window, settings, zone, slot, workload.PUBLICATION)
        self._conn = psycopg2.connect(source_server.conninfo())
        self._conn.autocommit = True
        self._end = source_server.start

    def execute(self, statement: str, *parameters: object) -> LsnWindow:
        """Execute a statement, and return the window of its commit."""
        with self._conn.cursor() as cursor:
            cursor.execute("set synchronous_commit = on")
            cursor.execute(statement, parameters)
            cursor.execute("select pg_current_wal_flush_lsn()::text")
            ((end,),) = cursor.fetchall()
        window = LsnWindow.of(1, self._end, Lsn.parse(end))
        self._end = window.end
        return window

    def close(self) -> None:
        self._conn.close()


@contextmanager
def _capture(source_server: Source) -> Iterator[_Capture]:
    with (
        source_server.slot() as slot,
        TemporaryDirectory(dir=source_server.folder) as folder,
        closing(_Capture(source_server, folder, slot)) as capture,
        capture.session,
    ):
        yield capture


def _beside_open_transaction(source_server: Source) -> Iterator[Result]:
    for name, is_session in (("", True), ("_single_windows", False)):
        with _capture(source_server) as capture:
            land = capture.session.land if is_session else capture.single
            for _ in range(2):
                # The slot's restart_lsn moves to a record of running transactions.
                land(capture.execute("select pg_log_standby_snapshot()"))
            without = _seconds(capture, land)
            with closing(psycopg2.connect(source_server.conninfo())) as other:
                with other.cursor() as cursor:
                    cursor.execute("insert into unpublished values (0, 'open')")
                retained = 0
                while retained < _RETAINED_BYTES:
                    window = capture.execute(_INSERT_UNPUBLISHED, 16_000)
                    retained += window.size_bytes
                    land(window)
                beside = _seconds(capture, land)
        log(
            f"{'one session' if is_session else 'single windows'}: {median(without):.2f} s a "
            f"window, {median(beside):.2f} s with {retained / 1e6:.0f} MB retained"
        )
        yield Result.of(f"capture_beside_open_transaction{name}", beside, without, "s")


def _seconds(capture: _Capture, land: Callable[[LsnWindow], CaptureReport]) -> list[float]:
    """Return the seconds of equal windows. The first is a warm-up."""
    taken = []
    for _ in range(_WINDOWS + 1):
        window = capture.execute(_INSERT, _ROWS)
        began = time.monotonic()
        land(window)
        taken.append(time.monotonic() - began)
    return taken[1:]


def _one_row(source_server: Source) -> Result:
    spent = []
    with _capture(source_server) as capture:
        for _ in range(_ONE_ROW_WINDOWS):
            window = capture.execute(_INSERT, 1)
            began = time.process_time()
            capture.session.land(window)
            spent.append((time.process_time() - began) * 1000)
    log(f"a window of one row: {median(spent):.0f} ms of CPU")
    return Result.against_limit("capture_one_row_cpu", spent, _CPU_LIMIT_MS, "ms")


def _freshness() -> Result:
    with TemporaryDirectory(prefix="pgcdc-bench-trickle-") as folder:
        with freshness_source.source(Path(folder)) as server:
            conninfo = server.conninfo(freshness_source.DATABASE)
            zone = RawZone(Lake(f"{folder}/lake"), freshness_source.NAME)
            [report] = snapshot_tables(
                ConnectionSettings(conninfo=conninfo, name=zone.name),
                zone,
                zone.name,
                freshness_source.PUBLICATION,
                [TableName("public", freshness_source.TABLE)],
            )
            if isinstance(report, SnapshotFailure):
                raise report.error
            with freshness_source.Writer(conninfo) as writer:
                durable_at, compacted = _follow(conninfo, zone, writer)
            writer.check()
        table = zone.changes.table.load()
        assert table is not None
        rows = table.to_pyarrow_table(columns=["window", "commit_ts", "commit_lsn"])
        commits = rows.group_by("commit_lsn").aggregate([("window", "max"), ("commit_ts", "max")])
        ages = [
            durable_at[window] - committed.timestamp()
            for window, committed in zip(
                commits["window_max"].to_pylist(), commits["commit_ts_max"].to_pylist(), strict=True
            )
            if window in durable_at
        ]
        files = len(table.file_uris())
    p95 = float(np.percentile(ages, 95))
    log(
        f"{len(ages)} transactions in {len(durable_at)} windows, p50 {median(ages):.2f} s, "
        f"p95 {p95:.2f} s; {files} files remain, {compacted} files were compacted"
    )
    counts = {
        "windows": str(len(durable_at)),
        "files_remaining": str(files),
        "files_compacted": str(compacted),
    }
    return replace(
        Result.against_limit("raw_freshness_p95", ages, _FRESHNESS_LIMIT, "s", value=p95),
        settings=counts,
    )


def _follow(
    conninfo: str, zone: RawZone, writer: freshness_source.Writer
) -> tuple[dict[str, float], int]:
    """Land windows by the rules of a run; return when each was durable, and the compacted files.

    The first windows are a warm-up, and have no time.
    """
    epoch = zone.epochs.latest()
    assert epoch is not None
    settings = ConnectionSettings(conninfo=conninfo, name=zone.name)
    durable_at: dict[str, float] = {}
    compacted, through, opened_at = 0, epoch.start_lsn, time.monotonic()
    end = time.monotonic() + _WARM_UP_SECONDS + _SECONDS
    with CaptureSession(settings, zone, zone.name, freshness_source.PUBLICATION) as session:
        while time.monotonic() < end:
            writer.check()
            plan = plan_window(
                CaptureProgress(
                    epoch.epoch,
                    through,
                    session.read_current_lsn(),
                    seconds_since_landing=time.monotonic() - opened_at,
                ),
                _POLICY,
            )
            if not isinstance(plan, Capture):
                time.sleep(poll_seconds(_POLICY))
                continue
            opened_at = time.monotonic()
            session.land(plan.window)
            if time.monotonic() > end - _SECONDS:
                durable_at[plan.window.key] = time.time()
            through = plan.window.end
            compacted += maintain_raw_zone(zone).files_merged
    return durable_at, compacted
