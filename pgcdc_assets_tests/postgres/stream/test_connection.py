"""Lost connections, stopped servers, and concurrent captures (B1 to B6)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
from psycopg import pq
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets import failpoints
from pgcdc_assets.capture.window import CaptureLimits
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConnectionLost, SlotBusy, SlotLost, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.slots.lease import capture_lease
from pgcdc_assets.postgres.stream import start
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.libpq_transport import LibpqWire
from pgcdc_assets.postgres.stream.request import StreamRequest, StreamSettings
from pgcdc_assets.postgres.stream.socket_transport import SocketWire
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import create_database
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.tls_server import refuse
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

# With this end, the capture waits after the last change has arrived.
FAR_AHEAD = 1 << 30


@pytest.fixture
def own_capturing(own_server: EmbeddedServer, tmp_path: Path) -> Capturing:
    """Return a capture from a server that the test may stop."""
    own_server.start()
    database = create_database(own_server, "source")
    zone = RawZone(Lake(str(tmp_path / "lake")), "test")
    return Capturing(database, zone, "s", database.conninfo)


def wait_for_stream(capturing: Capturing) -> int:
    """Wait until the walsender streams, and return its pid."""
    pid: int = wait_until(
        lambda: capturing.database.value(
            "select coalesce(max(pid), 0) from pg_stat_replication where state = 'streaming' "
            "and application_name = 'pgcdc capture test'"
        ),
        "the capture to stream",
    )
    return pid


@pytest.mark.sampled
@pytest.mark.usefixtures("wire")
def test_a_silent_connection_is_lost_after_the_limit(capturing: Capturing, proxy: TcpProxy) -> None:
    """B1."""
    capturing.begin("create table t (id int)")
    window = capturing.window(FAR_AHEAD)
    limits = CaptureLimits(stream=StreamSettings(silence_seconds=2))
    with capturing.through(proxy.conninfo(capturing.conninfo)).capture_aside(
        window, limits
    ) as outcome:
        wait_until(
            lambda: capturing.database.value(
                "select coalesce(max(reply_time) > max(backend_start) + interval '1 s', false) "
                "from pg_stat_replication where application_name = 'pgcdc capture test'"
            ),
            "the capture to stream for a second",
        )
        proxy.stall()
        capturing.database.execute("insert into t values (1)")
        wait_until(lambda: outcome.error, "the watchdog", limit_seconds=60)
    proxy.cut()

    assert isinstance(outcome.error, ConnectionLost)
    assert "silent for 2 s" in str(outcome.error)
    assert capturing.rows() == []
    assert capturing.confirmed() == window.start
    capturing.capture()
    assert capturing.texts("t") == [["1"]]


@pytest.mark.parametrize("kind", [SocketWire, LibpqWire])
def test_a_server_that_does_not_start_the_stream_is_a_lost_connection(
    capturing: Capturing, kind: type[SocketWire | LibpqWire]
) -> None:
    """B1: the limit applies to silence before the first message too."""
    conninfo = capturing.settings.conninfo_for("capture", replication=True)
    conn = pq.PGconn.connect(conninfo.encode())

    with pytest.raises(TimeoutError, match=r"no answer in 0\.3 s"):
        kind(conn, b"select pg_sleep(20)", WireSettings(start_seconds=0.3))
    conn.finish()


def test_a_connection_that_gssapi_encrypts_is_read_through_libpq(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server here has Kerberos: the answer of pg_stat_gssapi is a stand-in."""
    facts = start._FACTS.replace(b"exists (select", b"not exists (select")
    assert facts != start._FACTS
    monkeypatch.setattr(start, "_FACTS", facts)
    monkeypatch.setattr(start, "SocketWire", refuse)
    capturing.begin("create table t (id int)")
    capturing.database.execute("insert into t values (1)")
    capturing.capture()
    assert capturing.texts("t") == [["1"]]


@pytest.mark.sampled
@pytest.mark.usefixtures("wire")
def test_a_quiet_server_does_not_count_as_lost(capturing: Capturing) -> None:
    """B1: the server replies to status packets that request a reply."""
    capturing.begin("create table t (id int)")
    window = capturing.window(FAR_AHEAD)
    limits = CaptureLimits(total_seconds=5, stream=StreamSettings(silence_seconds=1))

    with pytest.raises(TransientError, match="limit of 5 s"):
        capturing.capture(window, limits)


@pytest.mark.sampled
@pytest.mark.usefixtures("wire")
def test_a_restart_of_the_server_fails_the_run_and_loses_no_change(
    own_capturing: Capturing, own_server: EmbeddedServer
) -> None:
    """B2."""
    own_capturing.begin("create table t (id int)")
    own_capturing.database.execute("insert into t values (1)")
    window = own_capturing.window(FAR_AHEAD)
    with own_capturing.capture_aside(window) as outcome:
        wait_for_stream(own_capturing)
        own_server.restart("immediate")

    assert isinstance(outcome.error, ConnectionLost)
    assert own_capturing.rows() == []
    own_capturing.database.execute("insert into t values (2)")
    own_capturing.capture()
    assert own_capturing.texts("t") == [["1"], ["2"]]


@pytest.mark.sampled
@pytest.mark.usefixtures("wire")
def test_a_fast_shutdown_does_not_wait_for_the_capture(
    own_capturing: Capturing, own_server: EmbeddedServer
) -> None:
    """B3: a walsender waits until its client has confirmed all WAL, and nothing is landed."""
    own_capturing.begin("create table t (id int)")
    own_capturing.database.execute("insert into t values (1)")
    window = own_capturing.window(FAR_AHEAD)
    with own_capturing.capture_aside(window) as outcome:
        wait_for_stream(own_capturing)
        began = time.monotonic()
        own_server.stop("fast")
        # Without a reaction of the capture, the walsender ends after one minute.
        assert time.monotonic() - began < 30
    own_server.start()

    assert isinstance(outcome.error, ConnectionLost)
    assert own_capturing.confirmed() == window.start
    own_capturing.capture()
    assert own_capturing.texts("t") == [["1"]]


@contextlib.contextmanager
def walsender(capturing: Capturing, application_name: str) -> Iterator[int]:
    """Hold the slot by a walsender with a silent client inside the block."""
    connection = psycopg2.connect(
        capturing.conninfo,
        application_name=application_name,
        connection_factory=LogicalReplicationConnection,
    )
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.start_replication(
            capturing.slot, options={"proto_version": "1", "publication_names": "pub"}
        )
        yield connection.info.backend_pid


def test_a_walsender_of_a_killed_run_is_terminated(capturing: Capturing) -> None:
    """B4."""
    capturing.begin("create table t (id int)")
    capturing.database.execute("insert into t values (1)")
    with walsender(capturing, "pgcdc capture test"):
        capturing.capture(limits=CaptureLimits(slot_wait_seconds=0.2))

    assert capturing.texts("t") == [["1"]]
    assert (
        capturing.database.value(
            "select count(*) from pg_replication_slots where database = %s",
            (capturing.database.name,),
        )
        == 1
    )


def test_a_walsender_of_another_program_is_not_terminated(capturing: Capturing) -> None:
    capturing.begin("create table t (id int)")
    window = capturing.window()
    with walsender(capturing, "other_program") as pid:
        with pytest.raises(SlotBusy) as caught:
            capturing.capture(window, CaptureLimits(slot_wait_seconds=0.2))
        assert caught.value.active_pid == pid
        assert capturing.status().active_pid == pid


def test_the_error_names_a_program_that_takes_the_slot_after_the_first_check(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4: the check finds the slot free, but START_REPLICATION finds the slot in use."""
    capturing.begin("create table t (id int)")
    window = capturing.window()
    monkeypatch.setattr(
        "pgcdc_assets.capture.connections.wait_or_terminate_stale_walsender", lambda *_, **__: None
    )
    with walsender(capturing, "other program") as pid:
        with pytest.raises(SlotBusy) as caught:
            capturing.capture(window)
        assert caught.value.active_pid == pid
        assert capturing.confirmed() == window.start


def test_the_error_names_a_program_that_takes_the_slot_from_our_stream(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4: our walsender ends after START_REPLICATION, and the second check finds another."""
    capturing.begin("create table t (id int)")
    window = capturing.window()
    enter = ReplicationStream.__enter__
    with contextlib.ExitStack() as others:
        holders = []

        def enter_and_lose_the_slot(stream: ReplicationStream) -> ReplicationStream:
            entered = enter(stream)
            capturing.database.value("select pg_terminate_backend(%s, 9000)", (stream.backend_pid,))
            holders.append(others.enter_context(walsender(capturing, "other program")))
            return entered

        monkeypatch.setattr(ReplicationStream, "__enter__", enter_and_lose_the_slot)
        with pytest.raises(SlotBusy, match=r"\(other program\)") as caught:
            capturing.capture(window)

        assert [caught.value.active_pid] == holders
        assert capturing.confirmed() == window.start


@pytest.mark.every_pg
def test_the_second_of_two_captures_fails_without_an_effect(capturing: Capturing) -> None:
    """B5."""
    window = capturing.begin_with_one_insert()
    with (
        query_connection(capturing.settings, "lease") as conn,
        capture_lease(conn, "test", capturing.slot),
    ):
        with pytest.raises(SlotBusy):
            capturing.capture(window)
    assert capturing.rows() == []
    assert capturing.confirmed() == window.start


def _end_lease(capturing: Capturing) -> None:
    capturing.database.value(
        "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity "
        "where application_name = 'pgcdc lease test' and datname = current_database()"
    )


def test_a_lease_lost_while_streaming_ends_the_capture(capturing: Capturing) -> None:
    """B6."""
    capturing.begin("create table t (id int)")
    window = capturing.window(FAR_AHEAD)
    with capturing.capture_aside(window) as outcome:
        wait_for_stream(capturing)
        _end_lease(capturing)

    assert isinstance(outcome.error, ConnectionLost)
    assert capturing.confirmed() == window.start


@pytest.mark.every_pg
def test_a_lease_lost_while_landing_discards_the_landing(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6: the files are written, but the next capture may already hold the lease."""
    window = capturing.begin_with_one_insert()

    def end_lease(name: str) -> None:
        if name == failpoints.AFTER_RELATIONS_COMMIT:
            _end_lease(capturing)

    monkeypatch.setattr(failpoints, "reach", end_lease)
    with pytest.raises(ConnectionLost):
        capturing.capture(window)
    monkeypatch.undo()

    assert capturing.rows() == []
    assert capturing.confirmed() == window.start
    capturing.capture(window)
    assert capturing.texts("t") == [["1"]]


@pytest.mark.every_pg(is_short=False)
def test_a_slot_that_is_lost_before_the_start_of_the_stream_is_named(
    own_capturing: Capturing,
) -> None:
    """The look at the slot is over when the server invalidates the slot."""
    own_capturing.begin("create table t (id int)")
    database = own_capturing.database
    for statement in (
        "alter system set max_slot_wal_keep_size = '1MB'",
        "select pg_reload_conf()",
        *["insert into t values (1)", "select pg_switch_wal()", "checkpoint"] * 4,
    ):
        database.execute(statement)
    assert database.value("select wal_status from pg_replication_slots") == "lost"
    request = StreamRequest(
        own_capturing.settings,
        own_capturing.slot,
        own_capturing.publication,
        Lsn(0),
        StreamSettings(),
    )
    with pytest.raises(SlotLost, match="pgcdc renew"):
        start.start_stream(request, lambda _: None)
