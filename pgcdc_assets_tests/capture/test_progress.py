"""Reports about a capture in progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from threading import Thread
from threading import enumerate as enumerate_threads

import pytest

from pgcdc_assets.activity import Activity, watched_by
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.meter import Meter, Phase
from pgcdc_assets.capture.progress import ProgressReport, Report, SourceReport
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

OFTEN = CaptureLimits(report_seconds=0.1)

SECRET = "a value of a row"


class _Watcher:
    """Keeps the activities that have ended."""

    def __init__(self) -> None:
        self.seen: list[Activity] = []

    def began(self, activity: Activity) -> None:
        pass

    def ended(self, activity: Activity) -> None:
        self.seen.append(activity)

    def noticed(self, text: str) -> None:
        pass


@pytest.mark.every_pg
def test_a_session_reports_its_source_and_where_its_time_goes(capturing: Capturing) -> None:
    capturing.begin("create table t (id int, v text)")
    capturing.database.execute(
        "insert into t select i, %s from generate_series(1, 1000) i", (SECRET,)
    )
    reports: list[Report] = []
    with CaptureSession(
        capturing.settings, capturing.zone, capturing.slot, "pub", OFTEN, on_report=reports.append
    ) as session:
        landed = session.land(capturing.window())

        def is_reported() -> bool:
            session.read_current_lsn()
            return sum(r.figures.windows for r in reports if isinstance(r, ProgressReport)) == 1

        wait_until(is_reported, "a report of the window")
        assert session.finish()

    reporter = f"report {capturing.slot}"
    wait_until(
        lambda: reporter not in {thread.name for thread in enumerate_threads()},
        "the thread of the reports to end",
    )
    source, *others = reports
    assert isinstance(source, SourceReport)
    version = capturing.database.value("show server_version").split(" ")[0]
    assert source.facts.server_version == version
    assert source.facts.settings["wal_level"] == "logical"
    assert source.facts.table_count >= 1
    assert version in str(source)

    progress = [report for report in others if isinstance(report, ProgressReport)]
    assert sum(report.figures.rows for report in progress) == 1000
    assert sum(report.figures.byte_count for report in progress) == landed.bytes_received
    for report in progress:
        assert sum(report.figures.seconds.values()) == pytest.approx(report.figures.at, abs=0.01)
    (after,) = [report for report in progress if report.figures.windows]
    assert after.captured_through == landed.window.end
    assert after.lag_bytes is not None
    assert not any(SECRET in str(report) for report in reports)
    assert "MB and 1.5 s" in str(replace(after, lag_bytes=0, lag_seconds=1.5))
    phases = landed.phase_seconds
    assert phases[Phase.CONNECTING] > 0
    assert phases[Phase.WAITING] > 0 and phases[Phase.DECODING] > 0
    assert phases[Phase.WRITING] > 0 and phases[Phase.COMMITTING] > 0
    assert sum(phases.values()) == pytest.approx(landed.seconds, abs=0.2)


def test_a_landing_is_an_activity_with_the_count_of_its_changes(capturing: Capturing) -> None:
    """The rows arrive in several batches."""
    capturing.begin("create table t (id int, v text)")
    capturing.database.execute(
        "insert into t select i, repeat('x', 100) from generate_series(1, 1000) i"
    )
    window = capturing.window()
    watcher = _Watcher()
    small = CaptureLimits(stream=StreamSettings(wire=WireSettings(batch_bytes=16 * 1024)))
    with watched_by(watcher):
        assert capturing.capture(window, small).row_count == 1000
    (landing,) = watcher.seen
    assert (landing.name, landing.unit) == (f"capture of window {window.key}", "changes")
    assert (landing.count, landing.is_done) == (1000, True)


def test_a_landing_enters_its_phases_in_order(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows arrive in several batches."""
    capturing.begin("create table t (id int, v text)")
    capturing.database.execute(
        "insert into t select i, repeat('x', 100) from generate_series(1, 1000) i"
    )
    window = capturing.window()
    entered = [Phase.IDLE]
    enter = Meter.enter

    def record(meter: Meter, phase: Phase) -> None:
        entered.append(phase)
        enter(meter, phase)

    monkeypatch.setattr(Meter, "enter", record)
    small = CaptureLimits(stream=StreamSettings(wire=WireSettings(batch_bytes=16 * 1024)))
    assert capturing.capture(window, small).row_count == 1000
    assert set(pairwise(entered)) == {
        (Phase.IDLE, Phase.CONNECTING),
        (Phase.CONNECTING, Phase.WAITING),
        (Phase.WAITING, Phase.DECODING),
        (Phase.DECODING, Phase.WRITING),
        (Phase.WRITING, Phase.DECODING),
        (Phase.DECODING, Phase.WAITING),
        (Phase.WRITING, Phase.COMMITTING),
        (Phase.COMMITTING, Phase.IDLE),
    }
    assert entered[-4:] == [Phase.DECODING, Phase.WRITING, Phase.COMMITTING, Phase.IDLE]


def test_the_bytes_of_the_windows_are_those_of_the_stream(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows end within the batches, and a window has several batches."""
    capturing.begin("create table t (id int, v text)")
    windows = capturing.windows_of(
        *["insert into t select i, repeat('x', 100) from generate_series(1, 300) i"] * 3
    )
    sizes: list[int] = []
    batches = ReplicationStream.batches

    def counted(stream: ReplicationStream) -> Iterator[MessageBatch]:
        for batch in batches(stream):
            sizes.append(batch.size_bytes)
            yield batch

    monkeypatch.setattr(ReplicationStream, "batches", counted)
    small = CaptureLimits(stream=StreamSettings(wire=WireSettings(batch_bytes=16 * 1024)))
    with capturing.session(small) as session:
        reports = [session.land(window) for window in windows]
        source = session._connections.source
        assert source is not None
        later = sum(batch.size_bytes for batch in source._hand)
        assert session.finish()
    assert len(sizes) > len(windows)
    assert sum(report.bytes_received for report in reports) + later == sum(sizes)


def test_a_landing_that_waits_is_reported_with_the_statistics_of_its_slot(
    capturing: Capturing,
) -> None:
    """The window ends far ahead of the WAL, so the capture waits inside the window."""
    capturing.begin("create table t (id int)")
    reports: list[Report] = []
    limits = replace(OFTEN, total_seconds=60)
    window = capturing.window(extra_bytes=1_000_000)
    with CaptureSession(
        capturing.settings, capturing.zone, capturing.slot, "pub", limits, on_report=reports.append
    ) as session:
        landing = Thread(target=lambda: session.land(window), daemon=True)
        landing.start()
        try:

            def has_statistics() -> bool:
                capturing.database.execute("insert into t values (1)")
                capturing.flush_lsn()
                last = reports[-1] if reports else None
                return (
                    isinstance(last, ProgressReport)
                    and last.decoded is not None
                    and last.decoded.total_txns > 0
                    and last.figures.seconds[Phase.WAITING] > 0
                )

            wait_until(has_statistics, "the statistics of the slot")
        finally:
            capturing.database.execute("insert into t select 1 from generate_series(1, 20000)")
            capturing.flush_lsn()
            landing.join(60)
    assert not landing.is_alive()
    assert any("the server decoded" in str(report) for report in reports)


def test_reports_that_take_longer_than_their_interval_do_not_stop_the_capture(
    capturing: Capturing,
) -> None:
    """The figures of the intervals in between are in the later reports."""
    capturing.begin("create table t (id int)")
    capturing.database.execute("insert into t select i from generate_series(1, 3000) i")
    reports: list[Report] = []

    def receive_slowly(report: Report) -> None:
        time.sleep(0.5)
        reports.append(report)

    limits = replace(OFTEN, report_seconds=0.001)
    with CaptureSession(
        capturing.settings, capturing.zone, capturing.slot, "pub", limits, on_report=receive_slowly
    ) as session:
        session.land(capturing.window())

        def is_reported() -> bool:
            session.read_current_lsn()
            return any(r.figures.windows for r in reports if isinstance(r, ProgressReport))

        wait_until(is_reported, "a report of the window")
        assert session.finish()
    figures = [report.figures for report in reports if isinstance(report, ProgressReport)]
    assert sum(each.rows for each in figures) == 3000
