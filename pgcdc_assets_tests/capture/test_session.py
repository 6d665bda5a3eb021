"""One session lands many windows over one stream, and resumes a lost connection."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.schema_watch import SchemaWatch
from pgcdc_assets.capture.source_stream import SourceStream
from pgcdc_assets.errors import RawZoneError, TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

RESUMED = CaptureLimits(resume_seconds=60, resume_pause_seconds=0.5, slot_wait_seconds=1)


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.usefixtures("wire")
def test_the_windows_of_a_session_come_from_one_stream(capturing: Capturing) -> None:
    """The messages behind a window's end begin the next window."""
    capturing.begin("create table t (id int)")
    windows = capturing.windows_of(*(f"insert into t values ({i}), ({-i})" for i in range(1, 5)))
    with capturing.session() as session:
        reports = [session.land(windows[0])]
        connections = capturing.sessions()
        assert [name for _, name in connections] == ["pgcdc capture test", "pgcdc lease test"]
        capturing.database.execute("insert into t values (9)")
        # The commit is asynchronous, and the last window ends at the flushed position.
        capturing.flush_lsn()
        reports += [session.land(window) for window in windows[1:]]
        last = LsnWindow.of(1, windows[-1].end, session.read_current_lsn())
        reports.append(session.land(last))
        # An idle server proves the end of an empty window.
        capturing.database.execute("create table other ()")
        reports.append(session.land(LsnWindow.of(1, last.end, capturing.flush_lsn())))
        assert session.read_written_lsn() >= session.read_current_lsn() > last.end
        assert capturing.sessions() == connections
        assert session.finish()

    assert [report.row_count for report in reports] == [2, 2, 2, 2, 1, 0]
    assert [report.bytes_received > 0 for report in reports] == [True] * 6
    assert [text[0] for text in capturing.texts("t")] == "1 -1 2 -2 3 -3 4 -4 9".split()
    assert [row["window"] for row in capturing.rows()][::2] == [w.key for w in windows] + [last.key]
    assert capturing.confirmed() == reports[-1].window.end


def test_a_window_that_another_capture_lands_is_an_error_to_run_again(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was lost between the look at the raw zone and the landing."""
    window = capturing.begin_with_one_insert()
    begin = SourceStream.begin_window

    def begin_late(source: SourceStream, begun: LsnWindow, schema: SchemaWatch) -> None:
        begin(source, begun, schema)
        RawZone(capturing.zone.lake, capturing.zone.name).changes.land(begun, [])

    with monkeypatch.context() as patched, pytest.raises(TransientError, match="run it again"):
        patched.setattr(SourceStream, "begin_window", begin_late)
        capturing.capture(window)
    assert capturing.capture(window).already_captured


def test_a_session_verifies_captured_windows_and_refuses_others(capturing: Capturing) -> None:
    capturing.begin("create table t (id int)")
    first, second, third = capturing.windows_of(*["insert into t values (1)"] * 3)
    with capturing.session() as session:
        assert not session.land(first).already_captured
        assert session.land(first).already_captured
        with pytest.raises(RawZoneError, match="in order"):
            session.land(third)
        with pytest.raises(RawZoneError, match="no epoch 2"):
            session.land(second._replace(epoch=2))
        assert session.land(second).row_count == 1
        # Another process holds no lease, but has landed the window: the stream starts again.
        capturing.zone.changes.land(third, [])
        assert session.land(third).already_captured
        capturing.database.execute("insert into t values (2)")
        assert session.land(capturing.window()).row_count == 1
    assert len(capturing.rows()) == 3


@pytest.mark.sampled
@pytest.mark.parametrize("failpoint", [
    failpoints.MID_STREAM,
    failpoints.BEFORE_DELTA_COMMIT,
    failpoints.AFTER_RELATIONS_COMMIT,
    failpoints.AFTER_DELTA_COMMIT,
    failpoints.AFTER_STATUS_PACKET,
])  # fmt: skip
def test_a_kill_in_a_later_window_of_a_session_loses_nothing(
    capturing: Capturing, failpoint: str
) -> None:
    """A2, A3: one batch has the messages of all windows."""
    capturing.begin("create table a (id int)", "create table b (id int)")
    windows = capturing.windows_of(
        "insert into a values (1)",
        "insert into b values (2); insert into a values (3)",
        "insert into b values (4)",
    )
    killed = capturing.capture_process(*windows, failpoint=f"{failpoint}:2")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    landed = [row["window"] for row in capturing.rows()]
    is_landed = failpoint in (failpoints.AFTER_DELTA_COMMIT, failpoints.AFTER_STATUS_PACKET)
    assert landed == [windows[0].key, *[windows[1].key] * 2][: 3 if is_landed else 1]
    assert capturing.confirmed() <= windows[len(set(landed)) - 1].end

    finished = capturing.capture_process(*windows)

    assert finished.stdout.split()[:2] == ["4", "False"], finished.stderr
    assert [(r["table"], r["new"]) for r in capturing.rows()] == [
        ("a", ["1"]), ("b", ["2"]), ("a", ["3"]), ("b", ["4"]),
    ]  # fmt: skip
    assert capturing.confirmed() == windows[-1].end


def test_a_session_parks_rows_and_continues_with_the_next_window(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    """A second stream brings the same bytes; the window after it has the messages in hand."""
    capturing.begin("create table t (id int, v text)")
    windows = capturing.windows_of(
        "insert into t values (1, 'fine')",
        "insert into t values (2, 'poison')",
        "insert into t values (3, 'fine')",
    )
    proxy.damage(b"t\0\0\0\x06poison", b"b\0\0\0\x06poison")
    with capturing.through(proxy.conninfo(capturing.conninfo)).session() as session:
        reports = [session.land(window) for window in windows]
        assert session.finish()
    assert [report.counts for report in reports] == [
        {"public.t": {operation: 1}} for operation in "IPI"
    ]
    assert [bool(report.warnings) for report in reports] == [False, True, False]
    assert proxy.connection_count == 3


def test_the_source_sees_two_connections_however_often_relations_are_announced(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    """Each TRUNCATE causes a new announcement of the table."""
    capturing.begin("create table t (id int)", "create table u (id int)")
    statements = ["truncate t; insert into t values (1)", "insert into u values (1)"]
    with capturing.database.connect() as connection, connection.cursor() as cursor:
        windows = []
        start = capturing.captured_through()
        for _ in range(3):
            for _ in range(100):
                for statement in statements:
                    cursor.execute(statement)
            windows.append(LsnWindow.of(1, start, capturing.flush_lsn()))
            start = windows[-1].end
    with capturing.through(proxy.conninfo(capturing.conninfo)).session() as session:
        for window in windows:
            assert session.land(window).row_count == 300
        assert len(capturing.sessions()) == 2
    assert proxy.connection_count == 2


def _random_history(capturing: Capturing, decide: random.Random) -> None:
    with capturing.database.connect() as connection, connection.cursor() as cursor:
        for number in range(60):
            table = decide.choice("ab")
            kind = decide.random()
            if kind < 0.1:
                cursor.execute(f"truncate {table}")
            elif kind < 0.2:
                cursor.execute(f"alter table {table} add column c{number} int default {number}")
            elif kind < 0.3:
                cursor.execute("select pg_logical_emit_message(true, 'p', 'content')")
            elif kind < 0.5:
                cursor.execute(f"update {table} set v = v || '.' where id % 3 = 0")
            else:
                count = int(10 ** decide.uniform(0, 2.5))
                cursor.execute(
                    f"insert into {table} (id, v) select i, repeat('x', i) "
                    f"from generate_series(1, {count}) i"
                )


@pytest.mark.sampled
@pytest.mark.parametrize("batch_bytes", [4_096, 8_000_000])
def test_a_session_of_many_windows_lands_the_same_rows_as_single_windows(
    capturing: Capturing, tmp_path: Path, seed: int, batch_bytes: int
) -> None:
    """The windows are cut at random LSNs, also inside transactions, and many are empty."""
    decide = random.Random(seed)
    capturing.begin(
        "create table a (id int, v text)", "alter table a replica identity full",
        "create table b (id int, v text)", "alter table b replica identity full",
    )  # fmt: skip
    other = f"{capturing.slot}_copy"
    capturing.database.value(
        "select pg_copy_logical_replication_slot(%s, %s)", (capturing.slot, other)
    )
    zone = RawZone(Lake(str(tmp_path / "single")), "test")
    epoch = capturing.zone.epochs.latest()
    assert epoch is not None
    zone.epochs.append(replace(epoch, slot=other))
    single = replace(capturing, zone=zone, slot=other)
    _random_history(capturing, decide)
    start, end = capturing.captured_through(), capturing.flush_lsn()
    cuts = {start, end, *(decide.randrange(start, end) for _ in range(12))}
    cuts |= {cut + 1 for cut in list(cuts)[:3] if cut + 1 < end}
    borders = sorted(cuts)
    windows = [LsnWindow.of(1, *pair) for pair in pairwise(borders)]
    limits = CaptureLimits(stream=StreamSettings(wire=WireSettings(batch_bytes=batch_bytes)))

    with capturing.session(limits) as session:
        reports = [session.land(window) for window in windows]
        assert session.finish()
    singles = [single.capture(window, limits) for window in windows]

    assert capturing.rows() == single.rows()
    assert len(capturing.rows()) > 0
    for report, one in zip(reports, singles, strict=True):
        # The number of keepalives differs.
        assert report == replace(one, seconds=report.seconds, bytes_received=report.bytes_received)
    assert capturing.zone.changes.windows(1) == zone.changes.windows(1)
    assert capturing.zone.relations.versions(1) == zone.relations.versions(1)
    assert capturing.confirmed() == single.confirmed() == end


@pytest.mark.every_pg
def test_a_session_knows_whether_changes_have_arrived_behind_its_last_window(
    capturing: Capturing,
) -> None:
    """A12: other tables and heartbeats are no changes. Servers before 15 send their commits."""
    capturing.begin("create table t (id int)", "create unlogged table other (id int)")
    window = capturing.window()
    with capturing.session() as session:
        # Without a stream, the session does not know.
        assert session.has_changes()
        session.land(window)
        pid = capturing.status().active_pid

        def is_sent(end: Lsn) -> bool:
            assert not session.has_changes()
            sent = capturing.database.value(
                "select sent_lsn::text from pg_stat_replication where pid = %s", (pid,)
            )
            return Lsn.parse(sent) >= end

        for statement in (
            "insert into other values (1)",
            "create table without_rows (id int)",
            "select pg_logical_emit_message(true, 'pgcdc', '')",
        ):
            capturing.database.execute(statement)
            end = capturing.flush_lsn()
            wait_until(lambda end=end: is_sent(end), "the walsender")  # type: ignore[misc]
        empty = capturing.window()
        assert session.land(empty).counts == {"(messages)": {"M": 1}}
        capturing.database.execute("insert into t values (1)")
        end = capturing.flush_lsn()
        wait_until(session.has_changes, "the insert")
        assert session.land(LsnWindow.of(1, empty.end, end)).row_count == 1
        assert session.finish()
    assert capturing.texts("t") == [["1"]]


def test_an_idle_session_keeps_the_last_batch_without_a_row(capturing: Capturing) -> None:
    """A12: a quiet publication on a busy server must not fill the memory with keepalives."""
    capturing.begin("create table t (id int)", "create unlogged table other (id int)")
    with capturing.session() as session:
        session.land(capturing.window())
        pid = capturing.status().active_pid
        for _ in range(10):
            capturing.database.execute("insert into other values (1)")
            end = capturing.flush_lsn()

            def is_sent(end: Lsn = end) -> bool:
                assert not session.has_changes()
                sent = "select sent_lsn::text from pg_stat_replication where pid = %s"
                return Lsn.parse(capturing.database.value(sent, (pid,))) >= end

            wait_until(is_sent, "the walsender")
        source = session._connections.source
        assert source is not None and len(source._hand) <= 2
        capturing.database.execute("insert into t values (1)")
        assert session.land(capturing.window()).row_count == 1
        assert session.finish()


def test_a_session_whose_stream_has_ended_does_not_know_of_changes(capturing: Capturing) -> None:
    capturing.begin("create table t (id int)")
    with capturing.session(RESUMED) as session:
        session.land(capturing.window())
        assert not session.has_changes()
        pid = capturing.status().active_pid
        capturing.database.value("select pg_terminate_backend(%s, 5000)", (pid,))
        wait_until(session.has_changes, "the end of the stream")
        capturing.database.execute("insert into t values (1)")
        assert session.land(capturing.window()).row_count == 1


def test_a_window_that_ends_inside_the_messages_in_hand_keeps_the_later_ones(
    capturing: Capturing,
) -> None:
    """The session has several batches in hand when a window ends in the first one."""
    capturing.begin("create table t (id int)")
    with capturing.session() as session:
        session.land(capturing.window())
        end = capturing.flush_lsn()
        capturing.database.execute("select pg_logical_emit_message(true, 'pgcdc', '')")
        pid, heard = capturing.status().active_pid, capturing.flush_lsn()

        def is_received() -> bool:
            assert not session.has_changes()
            sent = "select sent_lsn::text from pg_stat_replication where pid = %s"
            return Lsn.parse(capturing.database.value(sent, (pid,))) >= heard

        wait_until(is_received, "the heartbeat")
        capturing.database.execute("insert into t values (1)")
        wait_until(session.has_changes, "the insert")
        assert session.land(LsnWindow.of(1, capturing.captured_through(), end)).row_count == 0
        assert session.has_changes()
        assert session.land(capturing.window()).row_count == 2
        assert session.finish()
    assert capturing.texts("t") == [["1"]]
