"""A promoted standby that had not received all captured WAL is detected (B16)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from psycopg2 import OperationalError

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.landing import Landing
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import RawZoneError, SlotMissing
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.heartbeat import create_table_sql
from pgcdc_assets.postgres.wal.positions import read_barrier
from pgcdc_assets.postgres.wal.timelines import (
    ServerTimeline,
    check_timeline,
    find_shared_end,
    parse_history,
)
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import HeartbeatPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.server_folder import new_server_folder
from pgcdc_assets_tests.support.servers import SETTINGS
from pgcdc_assets_tests.support.standby import start_standby
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

SLOT = "pgcdc_test"
HEARTBEATS = HeartbeatPolicy(table="public.heartbeats")
BEATING = CaptureLimits(heartbeat=HEARTBEATS)


@dataclass
class Pair:
    """A primary, and a standby that keeps a copy of its logical slot."""

    primary: EmbeddedServer
    standby: EmbeddedServer

    @property
    def old(self) -> Database:
        return Database(self.primary, "postgres")

    @property
    def new(self) -> Database:
        return Database(self.standby, "postgres")

    def wait_for_standby(self, zone: RawZone) -> None:
        """Wait until the standby has replayed all captured WAL, and has synchronised the slot.

        No version before 17 synchronises slots. A standby synchronises a slot that needs neither
        WAL nor catalog rows older than the standby's own. Nothing may therefore be written between
        the synchronisation and the slot's last record of running transactions.
        """

        def is_ready() -> bool:
            self.old.execute("select pg_log_standby_snapshot()")
            with self.old.connect() as connection:
                _capture(self.old, zone, read_barrier(connection))
            self.new.execute("select pg_sync_replication_slots()")
            return bool(
                self.new.value(
                    "select exists (select from pg_replication_slots "
                    "where slot_name = %s and synced and not temporary)",
                    (SLOT,),
                )
            )

        if self.primary.version >= 17:
            wait_until(is_ready, "the standby to take the slot over")
        _wait_for_replay(self, _flush_lsn(self.old))

    def promote(self) -> None:
        def is_promoted() -> bool:
            try:
                return bool(self.new.value("select not pg_is_in_recovery()"))
            except OperationalError:
                return False

        self.new.execute("select pg_promote()")
        wait_until(is_promoted, "the standby to be promoted")


@pytest.fixture
def version() -> int:
    """Return the version of the pair's servers; a test may choose another."""
    return 18


@pytest.fixture
def pair(version: int) -> Iterator[Pair]:
    if binaries(version) is None:
        pytest.skip(f"Postgres {version} is not installed")
    folder = new_server_folder("pair")
    standby_settings = {**SETTINGS, "hot_standby_feedback": "on"}
    primary = EmbeddedServer(folder / "primary", version, SETTINGS)
    standby = EmbeddedServer(folder / "standby", version, standby_settings)
    try:
        primary.start()
        old = Database(primary, "postgres")
        old.execute("create table t (id int primary key); create publication pub for table t")
        # Before 17, a slot has no option failover.
        options = "false, false, true" if version >= 17 else "false"
        old.execute(
            f"select pg_create_logical_replication_slot(%s, 'pgoutput', {options})", (SLOT,)
        )
        start_standby(primary, standby, "standby")
        yield Pair(primary, standby)
    finally:
        primary.remove()
        standby.remove()
        folder.rmdir()


def _flush_lsn(database: Database) -> Lsn:
    database.transaction("set local synchronous_commit = on", "create temporary table flushed ()")
    return Lsn.parse(database.value("select pg_current_wal_flush_lsn()::text"))


def _window(database: Database, zone: RawZone, end: Lsn | None = None) -> LsnWindow:
    epoch = zone.epochs.latest()
    assert epoch is not None
    start = zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
    return LsnWindow.of(epoch.epoch, start, end or _flush_lsn(database))


def _capture(
    database: Database, zone: RawZone, end: Lsn | None = None, limits: CaptureLimits | None = None
) -> None:
    window = _window(database, zone, end)
    capture_window(database.settings(), zone, SLOT, "pub", window, limits)


def _heartbeat(database: Database) -> int:
    number = database.value("select heartbeat from heartbeats")
    assert isinstance(number, int)
    return number


def _ids(zone: RawZone) -> list[int]:
    table = zone.changes.table.load()
    assert table is not None
    rows = table.to_pyarrow_table().to_pylist()
    return sorted(int(row["new"][0]) for row in rows if row["table"] == "t")


def _errors(database: Database, zone: RawZone) -> list[str]:
    tables = (CdcTable("public", "t"),)
    capture = CdcCapture("test", "pub", tables, slot=SLOT, heartbeat=HEARTBEATS)
    findings = examine_capture(database.settings(), capture, zone)
    return [finding.code for finding in findings if finding.severity == "error"]


def _confirmed(database: Database) -> str:
    return str(
        database.value(
            "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s",
            (SLOT,),
        )
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("version", "is_old_lake"),
    [
        pytest.param(18, False, id="18"),
        pytest.param(18, True, marks=pytest.mark.soak, id="18, old lake"),
        pytest.param(17, False, marks=pytest.mark.soak, id="17"),
    ],
)
def test_after_a_failover_without_loss_the_capture_continues(
    pair: Pair, zone: RawZone, monkeypatch: pytest.MonkeyPatch, is_old_lake: bool
) -> None:
    """B16. An earlier release did not record the timeline of what it landed.

    The standby lacks a heartbeat that is behind the captured range. Timelines and heartbeats agree
    that no captured change was lost (decision 69).
    """
    pair.old.execute(create_table_sql(TableName("public", "heartbeats")))
    table_id = pair.old.value("select 'heartbeats'::regclass::oid")
    with monkeypatch.context() as patch:
        if is_old_lake:
            patch.setattr(Landing, "_timeline", lambda self: None)
        snapshot_tables(pair.old.settings(), zone, SLOT, "pub")
        pair.old.execute("insert into t values (1), (2)")
        with CaptureSession(pair.old.settings(), zone, SLOT, "pub", BEATING) as session:
            # The second window has the heartbeat that the session wrote at its start.
            for _ in range(2):
                session.land(_window(pair.old, zone))
            assert session.finish()
        pair.wait_for_standby(zone)
        end = _flush_lsn(pair.old)
        _wait_for_replay(pair, end)
        pair.standby.stop()
        _capture(pair.old, zone, end, BEATING)
    assert zone.changes.captured_on(1)[1] == (None if is_old_lake else 1)
    lost = _heartbeat(pair.old)
    pair.primary.kill()
    pair.standby.start()
    pair.promote()
    assert zone.changes.captured_heartbeat(1, table_id) == _heartbeat(pair.new) < lost
    pair.new.execute("insert into t values (3)")
    assert _errors(pair.new, zone) == []
    for number in (4, 5):
        _capture(pair.new, zone, limits=BEATING)
        pair.new.execute("insert into t values (%s)", (number,))
    assert _ids(zone) == [1, 2, 3, 4]
    assert zone.changes.captured_on(1)[1] == 2
    snapshot_tables(pair.new.settings(), zone, SLOT, "pub", [TableName("public", "t")])


@pytest.mark.sampled
@pytest.mark.parametrize("version", [18, pytest.param(17, marks=pytest.mark.soak)])
def test_a_slot_with_the_setting_failover_continues_on_the_promoted_standby(
    pair: Pair, zone: RawZone
) -> None:
    """B16: the slot exists without failover, and the next stream sets it."""
    pair.old.execute("select pg_drop_replication_slot(%s)", (SLOT,))
    snapshot_tables(pair.old.settings(), zone, SLOT, "pub")
    pair.old.execute("insert into t values (1)")
    epoch = zone.epochs.latest()
    assert epoch is not None
    window = LsnWindow.of(1, epoch.start_lsn, _flush_lsn(pair.old))
    limits = CaptureLimits(failover=True)
    capture_window(pair.old.settings(), zone, SLOT, "pub", window, limits)
    pair.wait_for_standby(zone)
    pair.primary.stop()
    pair.promote()
    pair.new.execute("insert into t values (2)")
    _capture(pair.new, zone)
    assert _ids(zone) == [1, 2]
    assert zone.changes.captured_on(1)[1] == 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    "version",
    [pytest.param(16, marks=pytest.mark.soak), pytest.param(18, marks=pytest.mark.soak), 15],
)
def test_after_a_failover_to_a_standby_without_the_slot_the_capture_stops_until_it_is_renewed(
    pair: Pair, zone: RawZone
) -> None:
    """B16: no version before 17 keeps a logical slot on a standby, and an operator may forget it.

    The standby has all captured WAL, and the promotion begins a new timeline.
    """
    snapshot_tables(pair.old.settings(), zone, SLOT, "pub")
    pair.old.execute("insert into t values (1)")
    _capture(pair.old, zone)
    _wait_for_replay(pair, _flush_lsn(pair.old))
    pair.primary.stop()
    pair.promote()
    pair.new.execute("insert into t values (2)")

    with pytest.raises(SlotMissing, match=r"promoted without a copy.*pgcdc renew"):
        _capture(pair.new, zone)
    assert "slot" in _errors(pair.new, zone)
    assert _ids(zone) == [1]

    renewed = renew_epoch(pair.new.settings(), zone, SLOT, "pub")
    assert (renewed.epoch, renewed.timeline) == (2, 2)
    [report] = snapshot_tables(pair.new.settings(), zone, SLOT, "pub")
    assert report.row_count == 2
    pair.new.execute("insert into t values (3)")
    _capture(pair.new, zone)
    assert _ids(zone) == [1, 3]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("version", "is_snapshot"),
    [
        (18, False),
        (18, True),
        *(pytest.param(older, False, marks=pytest.mark.soak) for older in (17, 16, 15, 14)),
    ],
)
def test_after_a_failover_that_lost_captured_wal_the_capture_stops_until_it_is_renewed(
    pair: Pair, zone: RawZone, version: int, is_snapshot: bool
) -> None:
    """B16: after the new primary has written more WAL, its position does not show the loss.

    The WAL of a window or of a snapshot is lost. Changes of the new primary below the LSN of the
    snapshot would not be merged.

    Before 17, an operator creates the slot on the new primary, below the captured range.
    """
    snapshot_tables(pair.old.settings(), zone, SLOT, "pub")
    pair.old.execute("insert into t values (1)")
    _capture(pair.old, zone)
    pair.wait_for_standby(zone)
    pair.standby.stop()
    pair.old.execute(
        "insert into t values (2); create table more as select generate_series(1, 9999)"
    )
    if is_snapshot:
        [taken] = snapshot_tables(
            pair.old.settings(), zone, SLOT, "pub", [TableName("public", "t")]
        )
        through: Lsn | None = taken.snapshot_lsn
    else:
        _capture(pair.old, zone)
        through = zone.changes.captured_through(1)
    captured = [1] if is_snapshot else [1, 2]
    pair.primary.kill()
    pair.standby.start()
    pair.promote()
    if version < 17:
        pair.new.query("select pg_create_logical_replication_slot(%s, 'pgoutput')", (SLOT,))
    before = _confirmed(pair.new)
    assert through is not None
    assert Lsn.parse(before) < through
    # More WAL than was lost, with other rows.
    pair.new.execute("insert into t select generate_series(100, 20000)")
    assert _flush_lsn(pair.new) > through

    with pytest.raises(RawZoneError, match=r"timeline 1.*timeline 2 now.*renew --name test"):
        _capture(pair.new, zone)
    with pytest.raises(RawZoneError, match="pgcdc renew"):
        snapshot_tables(pair.new.settings(), zone, SLOT, "pub", [TableName("public", "t")])
    assert _errors(pair.new, zone) == ["timeline"]
    assert _confirmed(pair.new) == before
    assert _ids(zone) == captured

    renewed = renew_epoch(pair.new.settings(), zone, SLOT, "pub")
    assert (renewed.epoch, renewed.timeline) == (2, 2)
    assert renewed.shared_through is not None
    assert Lsn(0) < renewed.shared_through < through
    [report] = snapshot_tables(pair.new.settings(), zone, SLOT, "pub")
    assert report.row_count == 1 + 19901
    pair.new.execute("insert into t values (50000)")
    _capture(pair.new, zone)
    assert _ids(zone) == [*captured, 50000]
    assert _errors(pair.new, zone) == []


def _wait_for_replay(pair: Pair, end: Lsn) -> None:
    wait_until(
        lambda: Lsn.parse(pair.new.value("select pg_last_wal_replay_lsn()::text")) >= end,
        "the standby to have all",
    )


_HISTORY = """\
1\t0/3000158\tno recovery target specified

2\t0/50000A0\tbefore transaction 731
"""


@dataclass(frozen=True)
class _Recorded(ServerTimeline):
    """A server with a given history file."""

    def switches(self) -> dict[int, Lsn]:
        return parse_history(_HISTORY)


@pytest.mark.parametrize(
    ("captured_on", "through", "is_fine"),
    [
        (3, "0/9000000", True),
        (2, "0/50000A0", True),
        (2, "0/50000A1", False),
        (1, "0/3000158", True),
        (1, "0/4000000", False),
        (4, "0/1000000", False),
        (None, "0/9000000", True),
    ],
)
def test_a_timeline_history_shows_whether_it_contains_captured_wal(
    captured_on: int | None, through: str, is_fine: bool
) -> None:
    server = _Recorded(3, None, 1.0)  # type: ignore[arg-type]
    shared = find_shared_end(captured_on, Lsn.parse(through), server)
    if is_fine:
        check_timeline("raw", captured_on, Lsn.parse(through), server)
        assert shared == Lsn.parse(through)
        return
    assert shared == parse_history(_HISTORY).get(captured_on or 0, Lsn(0))
    with pytest.raises(RawZoneError, match=f"through {through} on timeline {captured_on}"):
        check_timeline("raw", captured_on, Lsn.parse(through), server)
