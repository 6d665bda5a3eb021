"""The slot and the epoch of a snapshot."""

from __future__ import annotations

import threading
from contextlib import closing

import psycopg2
import pytest
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import (
    ConfigurationError,
    PgcdcError,
    RawZoneError,
    SlotBusy,
    SlotLost,
    SlotMissing,
    TransientError,
)
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.slots.status import create_slot, drop_slot
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import Database, create_database, drop_database
from pgcdc_assets_tests.support.handover import copied_rows
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


def _slots(database: Database) -> list[tuple[str, bool]]:
    return database.query(
        "select slot_name, temporary from pg_replication_slots where database = current_database()"
    )


def test_the_first_snapshot_creates_slot_and_epoch(
    database: Database, zone: RawZone, slot: str
) -> None:
    [report] = snapshot_tables(database.settings(), zone, slot, "pub")
    epoch = zone.epochs.latest()
    assert epoch is not None
    confirmed = database.value(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", (slot,)
    )
    assert report.row_count == 2
    assert report.snapshot_lsn == epoch.start_lsn == Lsn.parse(confirmed)
    assert (epoch.epoch, epoch.slot, epoch.publication) == (1, slot, "pub")
    assert epoch.database == database.name
    assert _slots(database) == [(slot, False)]


def test_a_slot_of_an_administrator_is_taken_over(
    database: Database, zone: RawZone, slot: str
) -> None:
    with create_slot(database.settings(), slot) as made:
        pass
    database.execute("insert into t values (3)")
    [report] = snapshot_tables(database.settings(), zone, slot, "pub")
    epoch = zone.epochs.latest()
    assert epoch is not None
    assert epoch.start_lsn == made.consistent_point < report.snapshot_lsn
    assert report.row_count == 3
    assert _slots(database) == [(slot, False)]


def test_a_slot_with_a_walsender_is_not_taken_over(
    database: Database, zone: RawZone, slot: str
) -> None:
    settings = database.settings("other")
    with create_slot(settings, slot):
        pass
    stream = psycopg2.connect(
        settings.conninfo_for("capture", replication=True),
        connection_factory=LogicalReplicationConnection,
    )
    with closing(stream), stream.cursor() as cursor:
        cursor.start_replication(slot, options={"proto_version": "1", "publication_names": "pub"})
        with pytest.raises(SlotBusy, match="pgcdc capture other"):
            snapshot_tables(database.settings(), zone, slot, "pub")
    assert zone.epochs.latest() is None


def test_a_missing_publication_leaves_no_slot(database: Database, zone: RawZone, slot: str) -> None:
    """B9."""
    with pytest.raises(ConfigurationError, match="Publication nowhere does not exist"):
        snapshot_tables(database.settings(), zone, slot, "nowhere")
    assert _slots(database) == []
    assert zone.epochs.latest() is None


def test_a_lake_that_cannot_be_written_leaves_no_slot(database: Database, slot: str) -> None:
    with pytest.raises(ConfigurationError, match="/proc/nowhere"):
        snapshot_tables(database.settings(), RawZone(Lake("/proc/nowhere"), "test"), slot, "pub")
    assert _slots(database) == []


def test_a_raw_zone_filled_from_another_slot_is_refused(
    database: Database, zone: RawZone, slot: str
) -> None:
    """Issue 3, bad input."""
    snapshot_tables(database.settings(), zone, slot, "pub")
    with pytest.raises(RawZoneError, match=f"filled from slot {slot} of database {database.name}"):
        snapshot_tables(database.settings(), zone, "another_slot", "pub")
    assert _slots(database) == [(slot, False)]
    other = create_database(database.server)
    try:
        other.execute("create publication pub")
        with pytest.raises(RawZoneError, match=f"not from slot {slot} of database {other.name}"):
            snapshot_tables(other.settings(), zone, slot, "pub")
    finally:
        drop_database(other)


def test_a_missing_slot_is_not_recreated(database: Database, zone: RawZone, slot: str) -> None:
    snapshot_tables(database.settings(), zone, slot, "pub")
    with query_connection(database.settings(), "test") as conn:
        drop_slot(conn, slot)
    with pytest.raises(SlotMissing, match=f"slot {slot} does not exist"):
        snapshot_tables(database.settings(), zone, slot, "pub", [TableName("public", "t")])
    assert _slots(database) == []


@pytest.mark.every_pg
def test_a_lost_slot_is_reported(database: Database, zone: RawZone, slot: str) -> None:
    """B11: capture and snapshot stop, and a new epoch has what the slot has lost."""
    capturing = Capturing(database, zone, slot, database.conninfo)
    snapshot_tables(database.settings(), zone, slot, "pub")
    database.execute("insert into t values (3)")
    capturing.capture()
    landed = capturing.rows()
    database.execute("insert into t values (4); delete from t where id = 1")
    with database.unreserved_slots():
        database.execute("checkpoint")
        with pytest.raises(SlotLost, match="is lost") as caught:
            snapshot_tables(database.settings(), zone, slot, "pub", [TableName("public", "t")])
        with pytest.raises(SlotLost, match="pgcdc renew"):
            capturing.capture()
    # Servers before version 17 report no reason of an invalidation.
    reason = "wal_removed" if database.server.version >= 17 else None
    assert caught.value.invalidation_reason == reason

    renewed = renew_epoch(database.settings(), zone, slot, "pub")
    assert renewed.epoch == 2
    [report] = snapshot_tables(database.settings(), zone, slot, "pub")
    source = database.query("select id::text from t order by id")
    assert sorted(copied_rows(zone, "t", report.snapshot_lsn)) == [list(row) for row in source]
    database.execute("insert into t values (5)")
    capturing.capture(LsnWindow.of(2, renewed.start_lsn, capturing.flush_lsn()))
    assert capturing.rows()[: len(landed)] == landed
    assert capturing.texts("t") == [["3"], ["5"]]


def test_two_concurrent_first_runs_create_one_slot_and_one_epoch(
    database: Database, zone: RawZone, slot: str
) -> None:
    """B5."""
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(
                snapshot_tables(database.settings(), RawZone(zone.lake, "test"), slot, "pub")
            )
        except PgcdcError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [outcome for outcome in outcomes if isinstance(outcome, PgcdcError)]
    assert all(isinstance(error, TransientError) for error in errors)
    assert len(errors) < 3
    assert len(zone.epochs.all()) == 1
    assert _slots(database) == [(slot, False)]


def test_a_connection_that_is_cut_during_a_snapshot_leaves_nothing(
    database: Database, zone: RawZone, slot: str, proxy: TcpProxy
) -> None:
    """B2."""
    database.execute("create table wide (id int primary key, note text)")
    database.execute(
        "insert into wide select i, repeat('x', 1000) from generate_series(1, 50000) i;"
        "alter publication pub add table wide"
    )
    proxy.throttle(30_000_000)

    def cut() -> None:
        wait_until(lambda: proxy.bytes_from_server > 5_000_000, "the rows of the table")
        proxy.cut()

    cutter = threading.Thread(target=cut)
    cutter.start()
    settings = ConnectionSettings(proxy.conninfo(database.conninfo), "test")
    with pytest.raises(TransientError):
        snapshot_tables(settings, zone, slot, "pub", [TableName("public", "wide")])
    cutter.join()
    assert zone.snapshots.complete_snapshots() == []
    proxy.throttle(None)
    assert [r.row_count for r in snapshot_tables(database.settings(), zone, slot, "pub")] == [
        2,
        50_000,
    ]
