"""A slot that another consumer has read is taken over only with consent (A9, B5)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.errors import PgcdcError, SlotAdvanced, SlotBusy, SlotTaken
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.slots.status import SlotStatus, create_slot, read_slot_status
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


@pytest.fixture
def other_zone(tmp_path: Path) -> RawZone:
    """Return another, empty lake of the same capture."""
    return RawZone(Lake(str(tmp_path / "other")), "test")


def _status(database: Database, slot: str) -> SlotStatus:
    with query_connection(database.settings(), "test") as conn:
        status = read_slot_status(conn, slot)
    assert status is not None
    return status


def _flush_lsn(database: Database) -> Lsn:
    database.transaction("set local synchronous_commit = on", "create temporary table flushed ()")
    return Lsn.parse(database.value("select pg_current_wal_flush_lsn()::text"))


def _capture(database: Database, zone: RawZone, slot: str) -> None:
    epoch = zone.epochs.latest()
    assert epoch is not None
    start = zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
    window = LsnWindow.of(epoch.epoch, start, _flush_lsn(database))
    capture_window(database.settings(), zone, slot, "pub", window)


def _copy(database: Database, zone: RawZone, slot: str, *, adopt_slot: bool = False) -> None:
    snapshot_tables(database.settings(), zone, slot, "pub", adopt_slot=adopt_slot)


def _make_by_hand(database: Database, slot: str) -> None:
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))


def _claim(database: Database, zone: RawZone, slot: str) -> None:
    """Create the slot of the production lake without a captured window."""
    _copy(database, zone, slot)


def _capture_once(database: Database, zone: RawZone, slot: str) -> None:
    _copy(database, zone, slot)
    database.execute("insert into t values (3)")
    _capture(database, zone, slot)


def _capture_and_reset(database: Database, zone: RawZone, slot: str) -> None:
    _capture_once(database, zone, slot)
    database.execute("select pg_stat_reset_replication_slot(%s)", (slot,))


@pytest.mark.every_pg
@pytest.mark.parametrize(
    "use",
    [
        _claim,
        pytest.param(_capture_once, marks=pytest.mark.soak),
        pytest.param(_capture_and_reset, marks=pytest.mark.soak),
    ],
)
def test_the_slot_of_another_lake_is_not_taken_over(
    database: Database,
    zone: RawZone,
    other_zone: RawZone,
    slot: str,
    use: Callable[[Database, RawZone, str], None],
) -> None:
    """The settings are the same with an empty lake, as after a mistyped PGCDC_LAKE."""
    use(database, zone, slot)
    before = _status(database, slot).confirmed_flush_lsn
    with pytest.raises(SlotTaken) as caught:
        _copy(database, other_zone, slot)
    assert caught.value.exit_status == 4
    remedy = "pgcdc sync --name test --adopt-slot"
    for part in (slot, str(before), other_zone.lake.uri, "PGCDC_LAKE", remedy):
        assert part in str(caught.value)
    assert other_zone.epochs.latest() is None
    assert _status(database, slot).confirmed_flush_lsn == before
    # The production capture continues.
    database.execute("insert into t values (10)")
    _capture(database, zone, slot)

    capture = CdcCapture("test", "pub", (CdcTable("public", "t"),), slot=slot)
    settings = database.settings()
    [error] = [f for f in examine_capture(settings, capture, other_zone) if f.severity == "error"]
    assert error.code == "slot"
    assert "--adopt-slot" in error.remedy
    assert not any(f.severity == "error" for f in examine_capture(settings, capture, zone))
    consented = dataclasses.replace(capture, adopt_slot=True)
    assert not any(f.severity == "error" for f in examine_capture(settings, consented, other_zone))


@pytest.mark.every_pg
def test_an_unread_slot_of_an_administrator_is_taken_over_after_a_long_time(
    database: Database, zone: RawZone, slot: str
) -> None:
    _make_by_hand(database, slot)
    database.execute("insert into t select generate_series(10, 5000)")
    made_at = _status(database, slot).confirmed_flush_lsn
    assert not _status(database, slot).was_read
    _copy(database, zone, slot)
    epoch = zone.epochs.latest()
    assert epoch is not None
    assert epoch.start_lsn == made_at
    assert _status(database, slot).confirmed_flush_lsn == made_at
    # Postgres 14 counts in a separate process, with a delay.
    wait_until(lambda: _status(database, slot).was_read, "the slot's statistics")


def test_with_consent_a_slot_is_taken_over_and_the_first_lake_stops(
    database: Database, zone: RawZone, other_zone: RawZone, slot: str
) -> None:
    _capture_once(database, zone, slot)
    _copy(database, other_zone, slot, adopt_slot=True)
    database.execute("insert into t values (4)")
    _capture(database, other_zone, slot)
    with pytest.raises(SlotAdvanced, match=r"another lake.*pgcdc renew --name test"):
        _capture(database, zone, slot)
    # Renewal would drop the slot of the other lake.
    with pytest.raises(SlotTaken, match="pgcdc renew --name test --adopt-slot"):
        renew_epoch(database.settings(), zone, slot, "pub")
    before = zone.epochs.latest()
    renewed = renew_epoch(database.settings(), zone, slot, "pub", adopt_slot=True)
    assert renewed.epoch == 2
    assert before is not None and before.created_at < renewed.created_at


def test_a_slot_that_another_program_reads_is_not_dropped_by_a_renewal(
    database: Database, zone: RawZone, slot: str
) -> None:
    _capture_once(database, zone, slot)
    database.execute("select pg_drop_replication_slot(%s)", (slot,))
    _make_by_hand(database, slot)
    stream = psycopg2.connect(
        database.settings("other").conninfo_for("capture", replication=True),
        connection_factory=LogicalReplicationConnection,
    )
    with closing(stream), stream.cursor() as cursor:
        cursor.start_replication(slot, options={"proto_version": "1", "publication_names": "pub"})
        pid = _status(database, slot).active_pid
        with pytest.raises(SlotBusy, match=rf"{slot} .* process {pid} \(pgcdc capture other\)"):
            renew_epoch(database.settings(), zone, slot, "pub", adopt_slot=True)
    assert [epoch.epoch for epoch in zone.epochs.all()] == [1]
    assert _status(database, slot).slot == slot


def test_two_captures_of_one_lake_do_not_share_a_slot(
    database: Database, zone: RawZone, slot: str
) -> None:
    _copy(database, zone, slot)
    with pytest.raises(SlotTaken, match="lake/second"):
        _copy(database, RawZone(zone.lake, "second"), slot)


def test_one_of_two_empty_lakes_gets_the_slot(
    database: Database, zone: RawZone, other_zone: RawZone, slot: str
) -> None:
    _make_by_hand(database, slot)
    outcomes: dict[int, object] = {}
    barrier = threading.Barrier(2)

    def run(number: int, own: RawZone) -> None:
        barrier.wait()
        try:
            _copy(database, own, slot)
            outcomes[number] = None
        except PgcdcError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate((zone, other_zone))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [own for number, own in enumerate((zone, other_zone)) if outcomes[number] is None]
    assert len(won) == 1, outcomes
    assert all(isinstance(o, SlotTaken | SlotBusy) for o in outcomes.values() if o is not None)
    _capture(database, won[0], slot)


def test_after_a_crash_of_the_server_a_read_slot_is_still_detected(
    database: Database, zone: RawZone, other_zone: RawZone, slot: str
) -> None:
    """A crash resets the slot's count of transactions, but not its positions."""
    _capture_once(database, zone, slot)
    database.execute("insert into t select generate_series(10, 5000)")
    _capture(database, zone, slot)
    database.execute("checkpoint")
    status = _status(database, slot)
    crashed = dataclasses.replace(status, decoded_transactions=0, may_have_crashed=True)
    assert crashed.was_read
    with create_slot(database.settings(), f"{slot}_new"):
        new = _status(database, f"{slot}_new")
    assert not dataclasses.replace(new, may_have_crashed=True).was_read


def test_a_synced_slot_is_refused_on_a_standby(database: Database, slot: str) -> None:
    from pgcdc_assets.postgres.slots.status import check_slot_usable

    _make_by_hand(database, slot)
    copied = dataclasses.replace(_status(database, slot), is_synced=True, in_recovery=True)
    with pytest.raises(PgcdcError, match="Connect to the primary"):
        check_slot_usable(copied, database.name)
    promoted = dataclasses.replace(copied, in_recovery=False)
    check_slot_usable(promoted, database.name)
