"""Sessions resume a lost connection, and hold or regain their lease."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread, Timer
from typing import NoReturn

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.demo.server import EmbeddedServer, StopMode
from pgcdc_assets.errors import ConnectionLost, SlotBusy, SlotMissing, TransientError
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import create_database
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

RESUMED = CaptureLimits(resume_seconds=60, resume_pause_seconds=0.5, slot_wait_seconds=1)

FAR_AHEAD = 1 << 30


@contextmanager
def beside(capturing: Capturing, *statements: str) -> Iterator[None]:
    """Execute statements, one after the other, beside the block."""

    def work() -> None:
        for statement in statements:
            time.sleep(0.3)
            capturing.database.execute(statement)

    thread = Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(30)


@pytest.mark.sampled
@pytest.mark.usefixtures("wire")
def test_a_lost_connection_is_resumed_from_the_last_landed_window(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    """B1, B4: the connection is cut between two windows, and inside a window."""
    capturing.begin("create table t (id int, v text)")
    first, second = capturing.windows_of(
        "insert into t values (1, ''), (2, '')",
        "insert into t select i, repeat(md5(i::text), 100) from generate_series(3, 3000) i",
    )
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    small = StreamSettings(wire=WireSettings(batch_bytes=64 * 1024))
    with through.session(replace(RESUMED, stream=small)) as session:
        session.land(first)
        proxy.cut()
        proxy.refuse()
        Timer(1, proxy.refuse, [False]).start()
        before = proxy.bytes_from_server

        def cut_in_the_middle() -> None:
            wait_until(lambda: proxy.bytes_from_server > before + 4_000_000, "the stream")
            proxy.cut()
            proxy.throttle(None)

        proxy.throttle(20_000_000)
        cutter = Thread(target=cut_in_the_middle, daemon=True)
        cutter.start()
        assert session.land(second).row_count == 2998
        cutter.join(30)
        assert session.finish()
    assert proxy.connection_count >= 6
    assert [int(text[0]) for text in capturing.texts("t")] == list(range(1, 3001))
    assert capturing.confirmed() == second.end


@pytest.mark.sampled
@pytest.mark.every_pg
def test_a_session_resumes_a_connection_that_has_fallen_silent(
    capturing: Capturing, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1: packets are lost inside a window, until the session tries a new connection."""
    first = capturing.begin("create table t (id int, v text)").window()
    passed: list[str] = []

    def stall_and_resume() -> None:
        known = proxy.connection_count
        wait_until(lambda: passed.count(failpoints.MID_STREAM) >= 5, "rows of the window")
        proxy.stall()
        try:
            wait_until(lambda: proxy.connection_count > known, "a new connection")
        finally:
            proxy.throttle(None)
            proxy.resume()

    through = capturing.through(proxy.conninfo(capturing.conninfo))
    stream = StreamSettings(silence_seconds=1, wire=WireSettings(batch_bytes=64 * 1024))
    with through.session(replace(RESUMED, stream=stream)) as session:
        session.land(first)
        # Most of the window has not arrived when the connection falls silent.
        proxy.throttle(2_000_000)
        capturing.database.execute(
            "insert into t select i, repeat(md5(i::text), 100) from generate_series(1, 3000) i"
        )
        second = capturing.window()
        monkeypatch.setattr(failpoints, "reach", passed.append)
        resumer = Thread(target=stall_and_resume, daemon=True)
        resumer.start()
        assert session.land(second).row_count == 3000
        assert session.finish()
        resumer.join(30)
    assert proxy.connection_count >= 4
    assert [int(text[0]) for text in capturing.texts("t")] == list(range(1, 3001))
    assert capturing.confirmed() == second.end


@pytest.mark.every_pg
@pytest.mark.sampled
def test_a_session_continues_after_restarts_of_the_server(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    """B2, B3: a shutdown does not wait for an idle session."""
    own_server.start()
    database = create_database(own_server, "source")
    zone = RawZone(Lake(str(tmp_path / "lake")), "test")
    capturing = Capturing(database, zone, "s", database.conninfo).begin("create table t (id int)")
    with capturing.session(RESUMED) as session:
        modes: tuple[StopMode, ...] = ("fast", "immediate")
        for number, mode in enumerate(modes):
            database.execute("insert into t values (%s)", (number,))
            assert session.land(capturing.window()).row_count == 1
            began = time.monotonic()
            own_server.stop(mode)
            assert time.monotonic() - began < 30
            own_server.start()
        database.execute("insert into t values (2)")
        assert session.land(capturing.window()).row_count == 1
        assert session.finish()
    assert capturing.texts("t") == [["0"], ["1"], ["2"]]
    assert capturing.confirmed() == capturing.captured_through()


def test_a_connection_that_is_lost_between_commit_and_confirmation_is_resumed(
    capturing: Capturing, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = capturing.begin_with_one_insert()

    with capturing.through(proxy.conninfo(capturing.conninfo)).session(RESUMED) as session:

        def cut(name: str) -> None:
            if name == failpoints.AFTER_DELTA_COMMIT:
                source = session._connections.source
                assert source is not None
                stream = source.stream
                proxy.cut()
                wait_until(lambda: stream._failure is not None, "the end of the stream")

        monkeypatch.setattr(failpoints, "reach", cut)
        report = session.land(window)
        assert session.finish()
    assert (report.row_count, report.already_captured) == (1, False)
    assert capturing.confirmed() == window.end
    assert proxy.connection_count == 4


def test_the_time_with_a_connection_does_not_count_against_the_limit_of_an_outage(
    capturing: Capturing, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One landing loses its connection twice."""
    window = capturing.begin_with_one_insert()
    losses: list[float] = []

    def cut(name: str) -> None:
        if name == failpoints.BEFORE_DELTA_COMMIT and len(losses) < 2:
            losses.append(time.monotonic())
            later = len(losses) * 1000
            monkeypatch.setattr(
                "pgcdc_assets.capture.limits.monotonic", lambda: time.monotonic() + later
            )
            proxy.cut()

    monkeypatch.setattr(failpoints, "reach", cut)
    with capturing.through(proxy.conninfo(capturing.conninfo)).session(RESUMED) as session:
        assert session.land(window).row_count == 1
        assert session.finish()
    assert len(losses) == 2
    assert len(capturing.rows()) == 1


def test_the_end_of_a_session_does_not_wait_for_a_server_that_has_fallen_silent(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    """A query that releases the lease would get no answer."""
    window = capturing.begin("create table t (id int)").window(extra_bytes=FAR_AHEAD)
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    limits = CaptureLimits(total_seconds=1, stream=StreamSettings(watch_seconds=0.1))
    Timer(0.5, proxy.stall).start()
    began = time.monotonic()
    with (
        pytest.raises(TransientError, match="longer than its limit"),
        through.session(limits) as session,
    ):
        session.land(window)
    assert time.monotonic() - began < 15


def test_a_session_resumes_for_a_limited_time_and_not_after_a_definite_error(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    capturing.begin("create table t (id int)")
    first, second = capturing.windows_of(*["insert into t values (1)"] * 2)
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    with through.session(replace(RESUMED, resume_seconds=1)) as session:
        session.land(first)
        proxy.cut()
        proxy.refuse()
        with pytest.raises(ConnectionLost):
            session.land(second)
        proxy.refuse(False)
        capturing.database.drop_slots()
        with pytest.raises(SlotMissing):
            session.land(second)
    assert len(capturing.rows()) == 1


def test_a_session_keeps_the_lease_between_its_windows(capturing: Capturing) -> None:
    """B5: another capture of the slot fails, and leaves slot and raw zone unchanged."""
    capturing.begin("create table t (id int)")
    first, second = capturing.windows_of(*["insert into t values (1)"] * 2)
    with capturing.session() as session:
        session.land(first)
        began = time.monotonic()
        # Before its first stream, a session does not resume.
        with pytest.raises(SlotBusy, match="pgcdc lease test"):
            capturing.capture(second, RESUMED)
        assert time.monotonic() - began < 15
        assert session.land(second).row_count == 1
        assert session.finish()
    assert capturing.capture(second).already_captured


def test_a_session_that_loses_its_lease_takes_it_again(capturing: Capturing) -> None:
    """B6: the lease ends during a landing, which is discarded and repeated."""
    capturing.begin("create table t (id int)")
    first, second = capturing.windows_of(*["insert into t values (1)"] * 2)
    third = second._replace(start=second.end, end=type(second.end)(second.end + FAR_AHEAD))
    with capturing.session(RESUMED) as session:
        session.land(first)
        pids = [pid for pid, _ in capturing.sessions()]
        capturing.database.value("select pg_terminate_backend(%s, 5000)", (pids[1],))
        session.land(second)
        assert not {pid for pid, _ in capturing.sessions()} & set(pids)
    with capturing.session() as session:
        with (
            pytest.raises(ConnectionLost, match="lease"),
            beside(
                capturing,
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                "where application_name = 'pgcdc lease test'",
            ),
        ):
            session.land(third)
    assert len(capturing.rows()) == 2


def test_a_lease_that_is_lost_directly_before_the_commit_prevents_it(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6: another capture may hold the lease, and land the same window."""
    window = capturing.begin_with_one_insert()

    def lose(name: str) -> None:
        if name == failpoints.AFTER_PREPARED_COMMIT:
            capturing.database.value(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                "where application_name = 'pgcdc lease test'"
            )

    with monkeypatch.context() as patch, pytest.raises(ConnectionLost, match="is discarded"):
        patch.setattr(failpoints, "reach", lose)
        capturing.capture(window)
    assert capturing.rows() == []
    assert not capturing.capture(window).already_captured


def test_a_question_over_a_lost_lease_names_its_session(capturing: Capturing) -> None:
    capturing.begin("create table t (id int)")
    with capturing.session() as session:
        session.read_current_lsn()
        ((pid, name),) = capturing.sessions()
        assert name == "pgcdc lease test"
        capturing.database.value("select pg_terminate_backend(%s, 5000)", (pid,))
        with pytest.raises(ConnectionLost, match="session 'pgcdc lease test'"):
            session.read_current_lsn()
        assert session.read_current_lsn() > 0


def test_a_stream_whose_start_fails_is_closed(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its status packets would keep the slot in use until the end of the process."""
    window = capturing.begin_with_one_insert()

    def fail(captured: object, epoch: int) -> NoReturn:
        raise TransientError(reason="the lake does not answer")

    with capturing.session() as session:
        with monkeypatch.context() as patch, pytest.raises(TransientError, match="does not answer"):
            patch.setattr("pgcdc_assets.capture.source_stream._read_messages", fail)
            session.land(window)
        wait_until(
            lambda: [name for _, name in capturing.sessions()] == ["pgcdc lease test"],
            "the walsender to end",
        )
        assert session.land(window).row_count == 1
