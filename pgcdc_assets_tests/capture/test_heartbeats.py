"""The heartbeats of a session in its source (A12), and the owner in a heartbeat table."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.progress import Notice, Report
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.errors import RawZoneError, SlotTaken
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.heartbeat import create_table_sql
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import HeartbeatPolicy, SlotPolicy
from pgcdc_assets.table_name import TableName, quoted
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

# A name that needs quotes.
TABLE = TableName("pgcdc own", 'Heart"%s beats')
NAME = quoted(*TABLE)
MESSAGES = CaptureLimits(heartbeat=HeartbeatPolicy(seconds=1))
ROWS = CaptureLimits(heartbeat=HeartbeatPolicy(seconds=1, table=str(TABLE)))


@pytest.fixture
def beating(capturing: Capturing) -> Capturing:
    """A capture of table `t`, with a heartbeat table outside the publication."""
    capturing.begin("create table t (id int)")
    capturing.database.execute("drop publication pub; create publication pub for table t")
    capturing.database.execute('create schema "pgcdc own"; ' + create_table_sql(TABLE))
    return capturing


@contextmanager
def _session(
    capturing: Capturing, limits: CaptureLimits, reports: list[Report]
) -> Iterator[CaptureSession]:
    with CaptureSession(
        *(capturing.settings, capturing.zone, capturing.slot, "pub", limits),
        on_report=reports.append,
    ) as session:
        yield session


def _row(capturing: Capturing) -> dict[str, object]:
    names = ("slot", "capture", "lake", "epoch", "captured_through", "heartbeat")
    [row] = capturing.database.query(f"select {', '.join(names)} from {NAME}")
    return dict(zip(names, row, strict=True))


def _heartbeat(capturing: Capturing) -> int:
    number = _row(capturing)["heartbeat"]
    assert isinstance(number, int)
    return number


@pytest.mark.every_pg
def test_messages_arrive_while_a_session_is_idle(capturing: Capturing) -> None:
    """A role without any privilege on tables writes a transaction of this database."""
    capturing.begin("create table t (id int)")
    role = f"plain_{capturing.database.name}"
    capturing.database.execute(f"create role {role} login replication")
    try:
        own = capturing.through(f"{capturing.conninfo} user={role}")
        with _session(own, MESSAGES, []) as session:
            session.land(capturing.window())

            def has_arrived() -> bool:
                return session.land(capturing.window()).counts == {"(messages)": {"M": 1}}

            wait_until(has_arrived, "a heartbeat")
            assert not session.has_changes()
            assert session.finish()
    finally:
        capturing.database.execute(f"drop role {role}")


@pytest.mark.sampled
@pytest.mark.every_pg
def test_a_row_names_the_owner_and_advances_while_a_session_is_idle(beating: Capturing) -> None:
    with _session(beating, ROWS, []) as session:
        window = beating.window()
        session.land(window)
        first = _heartbeat(beating)
        wait_until(lambda: _heartbeat(beating) >= first + 2, "heartbeats")
        row = _row(beating)
        assert session.finish()
    name = f"heartbeat {beating.slot}"
    wait_until(
        lambda: name not in {thread.name for thread in threading.enumerate()}, "the thread's end"
    )
    assert row["slot"] == beating.slot
    assert (row["capture"], row["epoch"]) == ("test", 1)
    assert row["lake"] == beating.zone.lake.path("test")
    assert Lsn.parse(str(row["captured_through"])) == window.end
    # The publication does not have the table.
    assert beating.rows() == []
    table_id = beating.database.value(f"select '{NAME}'::regclass::oid")
    assert beating.zone.changes.captured_heartbeat(1, table_id) is None
    with _session(beating, ROWS, []) as session:
        session.land(beating.window())
        wait_until(lambda: _heartbeat(beating) > first + 3, "a heartbeat")
        session.land(beating.window())
    captured = beating.zone.changes.captured_heartbeat(1, table_id)
    assert captured is not None and first < captured <= _heartbeat(beating)


@pytest.mark.sampled
def test_heartbeats_continue_after_an_outage(beating: Capturing, proxy: TcpProxy) -> None:
    """During the outage the session has no stream."""
    through = beating.through(proxy.conninfo(beating.conninfo))
    limits = replace(ROWS, resume_seconds=30, resume_pause_seconds=0.2)
    with _session(through, limits, []) as session:
        session.land(beating.window())
        proxy.cut()
        proxy.refuse()
        end = threading.Timer(2.5, proxy.refuse, (False,))
        end.start()
        session.land(beating.window())
        end.join()
        before = _heartbeat(beating)
        wait_until(lambda: _heartbeat(beating) > before, "a heartbeat after the outage")


@pytest.mark.sampled
def test_messages_continue_after_an_error_of_any_kind(capturing: Capturing) -> None:
    """A server in recovery, after a switchover, reports an internal error."""
    capturing.begin("create table t (id int)")
    functions = capturing.database.query(
        "select oid::regprocedure::text from pg_proc where proname = 'pg_logical_emit_message'"
    )
    reports: list[Report] = []
    with _session(capturing, MESSAGES, reports) as session:
        session.land(capturing.window())
        for (name,) in functions:
            capturing.database.execute(f"alter function {name} rename to moved")

        def notices() -> list[str]:
            session.read_current_lsn()
            return [str(report) for report in reports if isinstance(report, Notice)]

        wait_until(lambda: bool(notices()), "the notice")
        for (name,) in functions:
            moved = name.replace("pg_logical_emit_message", "moved")
            capturing.database.execute(f"alter function {moved} rename to pg_logical_emit_message")

        def has_arrived() -> bool:
            return session.land(capturing.window()).counts == {"(messages)": {"M": 1}}

        wait_until(has_arrived, "a heartbeat after the errors")
        [notice] = notices()
        assert session.finish()
    assert "No heartbeat was written: function pg_logical_emit_message" in notice


def test_heartbeats_that_fail_are_reported_once_and_do_not_end_the_capture(
    capturing: Capturing,
) -> None:
    capturing.begin("create table t (id int)")
    reports: list[Report] = []
    with _session(capturing, ROWS, reports) as session:
        session.land(capturing.window())

        def counted() -> int:
            session.read_current_lsn()
            return sum(isinstance(report, Notice) for report in reports)

        wait_until(lambda: counted() == 1, "the notice")
        capturing.database.execute('create schema "pgcdc own"; ' + create_table_sql(TABLE))
        wait_until(
            lambda: bool(capturing.database.query(f"select from {NAME}")),
            "the next heartbeat",
        )
        capturing.database.execute("insert into t values (1)")
        session.land(capturing.window())
        assert counted() == 1
        assert session.finish()
    [notice] = [report for report in reports if isinstance(report, Notice)]
    assert create_table_sql(TABLE) in str(notice)
    assert capturing.texts("t") == [["1"]]


def _other(capturing: Capturing, tmp_path: Path) -> Capturing:
    """Return the same capture with another lake."""
    zone = RawZone(Lake(str(tmp_path / "other")), "test")
    epoch = capturing.zone.epochs.latest()
    assert epoch is not None
    zone.epochs.append(epoch)
    return replace(capturing, zone=zone)


def _findings(capturing: Capturing, code: str, policy: HeartbeatPolicy) -> list[str]:
    """Return the sentences of `pgcdc check` about heartbeats, with their severity."""
    capture = CdcCapture(
        *("test", "pub", (CdcTable("public", "t"),)), slot=capturing.slot, heartbeat=policy
    )
    findings = examine_capture(capturing.settings, capture, capturing.zone)
    return [f"{each.severity}: {each}" for each in findings if each.code == code]


@pytest.mark.every_pg
def test_the_preflight_names_what_heartbeats_lack(capturing: Capturing) -> None:
    database = capturing.database
    capturing.begin("create table t (id int primary key)")

    def finding(own: Capturing = capturing, policy: HeartbeatPolicy | None = None) -> str:
        [found] = _findings(own, "heartbeat", policy or HeartbeatPolicy(table=str(TABLE)))
        return found

    assert finding(policy=HeartbeatPolicy()).startswith("ok")
    missing = finding()
    assert missing.startswith("warning") and "does not exist" in missing
    database.execute(f'create schema "pgcdc own"; create table {NAME} (slot name primary key)')
    assert "lacks the columns captured_through, capture" not in finding()
    assert "lacks the columns capture, captured_through" in finding()
    assert create_table_sql(TABLE) in missing
    database.execute(f"drop table {NAME}; {create_table_sql(TABLE)}")
    assert "each heartbeat is a change" in finding()
    database.execute("drop publication pub; create publication pub for table t")
    assert finding().startswith("ok")
    role = f"plain_{database.name}"
    database.execute(f"create role {role} login replication; grant select on t to {role}")
    try:
        own = capturing.through(f"{capturing.conninfo} user={role}")
        assert "may not write" in finding(own)
        database.execute(f'grant usage on schema "pgcdc own" to {role}')
        database.execute(f"grant select, insert, update on {NAME} to {role}")
        assert finding(own).startswith("ok")
        own.capture(limits=ROWS)
    finally:
        database.execute(f"drop owned by {role}; drop role {role}")
    assert _row(capturing)["slot"] == capturing.slot


def test_a_second_lake_is_refused_by_the_name_of_the_first(
    beating: Capturing, tmp_path: Path
) -> None:
    beating.capture(limits=ROWS)
    other = _other(beating, tmp_path)
    beating.database.execute("insert into t values (1)")
    before = beating.confirmed()
    with pytest.raises(SlotTaken) as caught:
        other.capture(limits=ROWS)
    for part in (beating.slot, beating.zone.lake.path("test"), "epoch 1", other.zone.lake.uri):
        assert part in str(caught.value)
    assert beating.confirmed() == before
    [owner] = _findings(other, "owner", HeartbeatPolicy(table=str(TABLE)))
    assert owner.startswith("error") and beating.zone.lake.path("test") in owner
    assert _findings(beating, "owner", HeartbeatPolicy(table=str(TABLE))) == []

    # With consent, the second lake takes over, and the first one is refused at once.
    adopting = replace(ROWS, adopt_slot=True)
    beating.database.execute(f"update {NAME} set lake_id = 'other', lake = 'elsewhere'")
    with pytest.raises(SlotTaken, match="of lake elsewhere"):
        beating.capture(limits=ROWS)
    beating.capture(limits=adopting)
    assert _row(beating)["lake"] == beating.zone.lake.path("test")
    assert beating.texts("t") == [["1"]]
    beating.capture(limits=ROWS)


def test_a_session_in_progress_reports_that_another_lake_has_taken_over(
    beating: Capturing,
) -> None:
    reports: list[Report] = []
    with _session(beating, ROWS, reports) as session:
        session.land(beating.window())
        beating.database.execute(f"update {NAME} set lake_id = 'other', lake = 'elsewhere'")

        def notices() -> list[str]:
            session.read_current_lsn()
            return [str(report) for report in reports if isinstance(report, Notice)]

        [notice] = wait_until(notices, "the notice", limit_seconds=30)
        assert session.finish()
    assert f"another lake has taken over slot {beating.slot}" in notice
    assert _row(beating)["lake"] == "elsewhere"


def _restore(beating: Capturing, heartbeat: int, *, keeps_version: bool) -> None:
    """Put an earlier heartbeat back, as a restore does; or as a dump does, in a new version."""
    xid = "" if keeps_version else ", xid = pg_current_xact_id()"
    beating.database.execute(f"update {NAME} set heartbeat = {heartbeat}{xid}")


def test_an_earlier_heartbeat_shows_a_restored_source(beating: Capturing) -> None:
    """The server has the same timeline, and its WAL is longer than the captured WAL."""
    with _session(beating, ROWS, []) as session:
        session.land(beating.window())
        first = _heartbeat(beating)
        wait_until(lambda: _heartbeat(beating) >= first + 2, "heartbeats")
        beating.database.execute("insert into t values (1)")
        session.land(beating.window())
    before = beating.confirmed()
    _restore(beating, first, keeps_version=False)
    slot_policy = SlotPolicy(heartbeat=ROWS.heartbeat)
    arguments = (beating.settings, beating.zone, beating.slot, "pub")
    for call in (
        lambda: beating.capture(limits=ROWS),
        lambda: snapshot_tables(*arguments, slot_policy=slot_policy),
    ):
        with pytest.raises(RawZoneError, match=r"restored from an older copy.*pgcdc renew"):
            call()
    assert beating.zone.snapshots.complete_snapshots() == []
    assert beating.confirmed() == before
    assert beating.texts("t") == [["1"]]
    [error] = _findings(beating, "owner", HeartbeatPolicy(table=str(TABLE)))
    assert "restored" in error


def test_a_repeated_landing_records_the_heartbeat_of_its_first_attempt(
    beating: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = HeartbeatPolicy(seconds=3600, table=str(TABLE))
    limits = CaptureLimits(resume_seconds=60, heartbeat=policy)
    table_id = beating.database.value("select %s::regclass::oid::bigint", (NAME,))
    lost: list[int] = []

    def lose_connections(name: str) -> None:
        if name == failpoints.BEFORE_DELTA_COMMIT and not lost:
            lost.extend(pid for pid, _ in beating.sessions())
            for pid in lost:
                beating.database.value("select pg_terminate_backend(%s)", (pid,))

    with _session(beating, limits, []) as session:
        session.land(beating.window())
        number = _heartbeat(beating)
        assert beating.zone.changes.captured_heartbeat(1, table_id) is None
        monkeypatch.setattr(failpoints, "reach", lose_connections)
        session.land(beating.window())
        assert lost
        assert beating.zone.changes.captured_heartbeat(1, table_id) == number
        session.land(beating.window())
        assert beating.zone.changes.captured_heartbeat(1, table_id) == number + 1


def test_an_edited_reloaded_or_missing_heartbeat_is_no_alarm(beating: Capturing) -> None:
    beating.capture(limits=ROWS)
    with _session(beating, ROWS, []) as session:
        session.land(beating.window())
        first = _heartbeat(beating)
        wait_until(lambda: _heartbeat(beating) >= first + 2, "heartbeats")
        session.land(beating.window())
    name = NAME
    _restore(beating, 1, keeps_version=True)
    beating.capture(limits=ROWS)
    assert _heartbeat(beating) > first + 2
    # A vacuum freezes the row, and a rewrite copies it.
    beating.database.execute(f"vacuum (full, freeze) {name}")
    beating.capture(limits=ROWS)
    beating.database.execute(f"delete from {name}")
    # The first session writes a new row, and the second one compares the row.
    beating.capture(limits=ROWS)
    with _session(beating, ROWS, []) as session:
        session.land(beating.window())
        beating.database.execute(f"delete from {name}")
        wait_until(lambda: bool(beating.database.query(f"select from {name}")), "a new row")
    beating.capture(limits=ROWS)
    beating.database.execute(f"create table reloaded as select * from {name}")
    beating.database.execute(f"truncate {name}; insert into {name} select * from reloaded")
    beating.database.execute(f"update {name} set heartbeat = 1")
    beating.capture(limits=ROWS)
    beating.database.execute(f"drop table {name}; " + create_table_sql(TABLE))
    beating.capture(limits=ROWS)
    beating.database.execute(f"drop table {name}")
    beating.capture(limits=ROWS)
