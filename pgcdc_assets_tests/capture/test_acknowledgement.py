"""Only landed changes are acknowledged, and a slot that was changed is refused (A1, A8 to A12)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.capture import landing
from pgcdc_assets.capture.window import NOT_ACKNOWLEDGED, CaptureLimits
from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.errors import (
    DefiniteError,
    RawZoneError,
    SlotAdvanced,
    SlotMissing,
    TransientError,
)
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets_tests.protocol.test_decoder import FAR, numbering
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import create_database, drop_database
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

SMALL = StreamSettings(queued_batches=1, wire=WireSettings(batch_bytes=64 * 1024))


@contextmanager
def streaming(
    capturing: Capturing, settings: StreamSettings | None = None
) -> Iterator[ReplicationStream]:
    with ReplicationStream(
        capturing.settings,
        capturing.slot,
        capturing.publication,
        capturing.captured_through(),
        settings,
    ) as stream:
        yield stream


def rows_until(stream: ReplicationStream, count: int) -> list[dict[str, Any]]:
    """Decode until `count` rows have arrived, and land no row."""
    decoder = Decoder(numbering(), FAR)
    rows: list[dict[str, Any]] = []
    for batch in stream.batches():
        decoded = decoder.decode(batch)
        rows += [] if decoded is None else decoded.to_pylist()
        if len(rows) >= count:
            return rows
    raise AssertionError("the stream ended")


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.usefixtures("wire")
def test_a_slow_client_acknowledges_only_landed_transactions(
    capturing: Capturing,
) -> None:
    """A1: the transaction that commits last began first, and has the oldest rows."""
    slow = capturing.begin("create table t (id int, filler text)").with_sender_timeout(4)
    with slow.database.connect(autocommit=False) as t2:
        with t2.cursor() as cursor:
            cursor.execute("insert into t values (20, repeat('x', 1000))")
            slow.database.execute("insert into t values (0, 'landed')")
            landed = slow.window()
            slow.capture(landed)
            slow.database.execute(
                "insert into t select 1, repeat('x', 1000) from generate_series(1, 3000)"
            )
            cursor.execute("insert into t select 21, repeat('x', 1000) from generate_series(1, 99)")
        t2.commit()
    end = slow.flush_lsn()

    with streaming(slow, SMALL) as stream:
        rows = rows_until(stream, 3001)
        assert rows[0]["new"][0] == "1"
        assert rows[3000]["new"][0] == "20"
        # The test reads no further batch, so first the queue and then the socket fill up.
        slow.wait_for_replies(4)
        assert slow.confirmed() == landed.end
    slow.capture(LsnWindow.of(1, landed.end, end))

    assert [text[0] for text in slow.texts("t")] == ["0"] + ["1"] * 3000 + ["20"] + ["21"] * 99


@pytest.mark.every_pg
@pytest.mark.usefixtures("wire")
def test_a_flush_position_never_decreases(capturing: Capturing) -> None:
    """A8."""
    capturing.begin("create table t (id int)")
    capturing.database.execute("insert into t values (1)")
    old = capturing.flush_lsn()
    capturing.database.execute("insert into t values (2)")
    new = capturing.flush_lsn()

    with streaming(capturing) as stream:
        stream.confirm(new)
        stream.confirm(old)
        assert stream.finish()

    assert capturing.confirmed() == new


@pytest.mark.every_pg
def test_a_slot_that_another_program_advanced_stops_the_capture(capturing: Capturing) -> None:
    """A9: the error names both LSNs and the gap, and so does the pre-flight."""
    capturing.begin("create table t (id int primary key)")
    expected = capturing.captured_through()
    capturing.database.execute("insert into t values (1)")
    window = capturing.window()
    capturing.database.value(
        "select pg_replication_slot_advance(%s, %s)", (capturing.slot, str(window.end))
    )

    with pytest.raises(SlotAdvanced) as caught:
        capturing.capture(window)

    moved = capturing.confirmed()
    assert (caught.value.expected, caught.value.confirmed_flush_lsn) == (expected, moved)
    assert f"{moved - expected} bytes" in str(caught.value)
    assert capturing.rows() == []
    capture = CdcCapture("test", "pub", (CdcTable("public", "t"),), slot=capturing.slot)
    findings = examine_capture(capturing.settings, capture, capturing.zone)
    [error] = [each for each in findings if (each.code, each.severity) == ("slot", "error")]
    assert f"{moved - expected} bytes" in error.message


def test_a_slot_that_advances_after_the_first_check_stops_the_capture(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A9: START_REPLICATION would skip the gap silently."""
    window = capturing.begin_with_one_insert()
    enter = ReplicationStream.__enter__

    def move_and_enter(stream: ReplicationStream) -> ReplicationStream:
        capturing.database.value(
            "select pg_replication_slot_advance(%s, %s)", (capturing.slot, str(window.end))
        )
        return enter(stream)

    monkeypatch.setattr(ReplicationStream, "__enter__", move_and_enter)
    with pytest.raises(SlotAdvanced):
        capturing.capture(window)
    assert capturing.rows() == []


@pytest.mark.every_pg
def test_a_recreated_slot_is_not_accepted_as_the_old_slot(capturing: Capturing) -> None:
    """A10."""
    capturing.begin("create table t (id int)")
    capturing.database.execute("insert into t values (1)")
    capturing.database.value("select pg_drop_replication_slot(%s)", (capturing.slot,))
    with pytest.raises(SlotMissing, match=capturing.slot):
        capturing.capture()
    capturing.database.value(
        "select pg_create_logical_replication_slot(%s, 'pgoutput')", (capturing.slot,)
    )

    with pytest.raises(SlotAdvanced):
        capturing.capture()
    assert capturing.rows() == []


def test_a_window_out_of_order_is_refused(capturing: Capturing) -> None:
    capturing.begin("create table t (id int)")
    window = capturing.window()

    with pytest.raises(RawZoneError, match="Capture windows in order"):
        capturing.capture(LsnWindow.of(1, window.start + 8, window.end + 8))
    with pytest.raises(DefiniteError, match="no epoch 2"):
        capturing.capture(LsnWindow.of(2, window.start, window.end))


@pytest.mark.every_pg
def test_keepalives_advance_the_slot_of_an_idle_publication(capturing: Capturing) -> None:
    """A11: only a table outside the publication changes."""
    capturing.database.execute("create table t (id int); create table other (id int)")
    capturing.begin()
    capturing.database.execute("drop publication pub; create publication pub for table t")
    capturing.capture()
    before = capturing.status()
    for _ in range(2):
        capturing.database.execute("insert into other select generate_series(1, 1000)")
        # A checkpoint logs the running transactions, from which the server derives restart_lsn.
        capturing.database.execute("checkpoint")
        window = capturing.window()
        report = capturing.capture(window)
        assert report.row_count == 0
        assert capturing.confirmed() == window.end
    after = capturing.status()

    assert before.restart_lsn is not None and after.restart_lsn is not None
    assert after.restart_lsn > before.restart_lsn
    assert capturing.rows() == []


@pytest.mark.every_pg
def test_the_slot_advances_while_another_database_is_busy(capturing: Capturing) -> None:
    """A12."""
    capturing.begin("create table t (id int)")
    other = create_database(capturing.database.server)
    try:
        other.execute("create table busy (id int)")
        retained = []
        for _ in range(3):
            start = capturing.flush_lsn()
            other.execute("insert into busy select generate_series(1, 20000)")
            # A checkpoint logs the running transactions, which lets `restart_lsn` move.
            other.execute("checkpoint")
            window = capturing.window()
            assert capturing.capture(window).row_count == 0
            assert capturing.confirmed() == window.end
            retained.append((capturing.status().retained_bytes, int(window.end - start)))
    finally:
        drop_database(other)

    # The server retains the WAL of a turn at most.
    assert all(kept is not None and kept <= 1.2 * written for kept, written in retained[1:])


def test_the_time_limit_does_not_affect_a_landed_window(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = capturing.begin_with_one_insert()
    settings = StreamSettings(watch_seconds=0.05)
    _linger_at(failpoints.AFTER_DELTA_COMMIT, 2, monkeypatch)

    capturing.capture(window, CaptureLimits(total_seconds=2, stream=settings))

    assert capturing.confirmed() == window.end


def test_a_limit_that_passes_before_the_commit_reports_a_landed_window(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the stream does not affect a landed window, which the next run confirms."""
    window = capturing.begin_with_one_insert()
    settings = StreamSettings(watch_seconds=0.05)
    _linger_at(failpoints.BEFORE_DELTA_COMMIT, 2, monkeypatch)

    with capturing.session(CaptureLimits(total_seconds=2, stream=settings)) as session:
        with pytest.raises(
            TransientError, match=r"is landed, but its end is not confirmed yet.*limit of 2 s"
        ):
            session.land(window)
        assert capturing.confirmed() == window.start
        monkeypatch.undo()
        assert session.land(window).already_captured
        assert session.finish()
    assert capturing.confirmed() == window.end
    assert capturing.texts("t") == [["1"]]


@pytest.mark.parametrize(("seconds_of_a_look", "is_seen"), [(200, False), (50, True)])
def test_a_limit_that_leaves_no_time_for_a_look_at_the_catalog_does_not_stop_the_landing(
    capturing: Capturing,
    monkeypatch: pytest.MonkeyPatch,
    seconds_of_a_look: float,
    is_seen: bool,
) -> None:
    """The next look sees the change."""
    capturing.begin_with_one_insert()
    capturing.capture()
    capturing.database.execute("alter table t add v int")
    monkeypatch.setattr(landing, "_LOOK_SECONDS", seconds_of_a_look)

    capturing.capture(limits=CaptureLimits(total_seconds=120))

    def changes() -> list[str]:
        return [event.change for event in capturing.zone.schema_events.read()]

    assert changes() == ["column_added"] * is_seen
    capturing.capture()
    assert changes() == ["column_added"]


def test_a_confirmation_that_the_server_has_not_acknowledged_is_a_warning(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    """The server replies between two transactions, and is sending a large one."""
    window = capturing.begin_with_one_insert()
    capturing.database.execute("insert into t select i from generate_series(1, 100000) i")
    proxy.throttle(400_000)
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    limits = CaptureLimits(stream=StreamSettings(end_seconds=0.2, wire=SMALL.wire))

    report = through.capture(window, limits)

    assert (report.row_count, report.warnings) == (1, {NOT_ACKNOWLEDGED: 1})
    assert capturing.capture(window).warnings == {}
    assert capturing.confirmed() == window.end


def _linger_at(failpoint: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait at a failpoint until the time has passed and the stream has checked its limit."""

    def linger(name: str) -> None:
        if name == failpoint:
            until = time.monotonic() + seconds + 0.5
            wait_until(lambda: time.monotonic() > until, "the limit to pass")

    monkeypatch.setattr(failpoints, "reach", linger)
