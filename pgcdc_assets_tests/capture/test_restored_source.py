"""A server that is restored from a copy of its data folder, without a new timeline (B16)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConfigurationError, RawZoneError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.heartbeat import create_table_sql
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import HeartbeatPolicy, SlotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import Database

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

HEARTBEATS = HeartbeatPolicy(table="public.heartbeats")
LIMITS = CaptureLimits(heartbeat=HEARTBEATS)
POLICY = SlotPolicy(heartbeat=HEARTBEATS)
EXTRA = TableName("public", "extra")


def _capturing(server: EmbeddedServer, zone: RawZone) -> Capturing:
    database = Database(server, "postgres")
    return Capturing(database, zone, "pgcdc_test", database.conninfo)


def _window(capturing: Capturing) -> LsnWindow:
    epoch = capturing.zone.epochs.latest()
    assert epoch is not None
    return LsnWindow.of(epoch.epoch, capturing.captured_through(), capturing.flush_lsn())


def _land_twice(capturing: Capturing) -> None:
    """Land two windows: the second one has the heartbeat that the session wrote at its start."""
    with capturing.session(LIMITS) as session:
        for _ in range(2):
            session.land(_window(capturing))
        assert session.finish()


def _errors(capturing: Capturing) -> list[str]:
    tables = (CdcTable("public", "t"),)
    capture = CdcCapture("test", "pub", tables, slot=capturing.slot, heartbeat=HEARTBEATS)
    findings = examine_capture(capturing.settings, capture, capturing.zone)
    return [finding.code for finding in findings if finding.severity == "error"]


def _publish(capturing: Capturing, table: str) -> int:
    """Create and publish a table, and return its OID."""
    execute = capturing.database.execute
    execute(f"create table {table} (id int primary key); alter publication pub add table {table}")
    oid: int = capturing.database.value(f"select '{table}'::regclass::oid::bigint")
    return oid


def _take_snapshot(capturing: Capturing, *tables: TableName) -> None:
    zone, slot = capturing.zone, capturing.slot
    snapshot_tables(capturing.settings, zone, slot, "pub", tables or None, slot_policy=POLICY)


def _copy(source: Path, target: Path) -> None:
    """Copy the data folder of a stopped server, with its owner."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", source, target], check=True)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "own_server", [18, pytest.param(16, marks=pytest.mark.soak)], indirect=True
)
def test_a_server_restored_from_a_cold_copy_stops_the_capture_until_it_is_renewed(
    own_server: EmbeddedServer, zone: RawZone, tmp_path: Path
) -> None:
    """B16: the WAL has grown beyond the captured range, and the timeline is the same.

    The server is restored twice. The second time, the copy is older than the lake's epoch. The
    restored server gives the OID of a table that is gone to another table.
    """
    server, copy = own_server.start(), tmp_path / "copy"
    capturing = _capturing(server, zone)
    database = capturing.database
    table = "create table t (id int); alter table t replica identity full"
    capturing.begin(create_table_sql(TableName("public", "heartbeats")), table)
    database.execute("drop publication pub; create publication pub for table t")
    _land_twice(capturing)
    server.stop()
    _copy(server.data_dir, copy)
    server.start()
    capturing = _capturing(server, zone)
    oid = _publish(capturing, "extra")
    _take_snapshot(capturing, EXTRA)
    for epoch in (1, 2):
        capturing = _capturing(server, zone)
        database.execute("insert into t values (1)")
        _land_twice(capturing)
        rows, through = capturing.rows(), capturing.captured_through()
        assert capturing.texts("t") == [["1"]] * epoch
        server.stop()
        _copy(copy, server.data_dir)
        server.start()

        capturing = _capturing(server, zone)
        assert _publish(capturing, "other") == oid
        before = capturing.confirmed()
        # Without heartbeats, only a shorter WAL shows the restore.
        with pytest.raises(RawZoneError, match="the server's WAL ends at"):
            capturing.capture(LsnWindow.of(epoch, through, through + 8192))
        assert _errors(capturing) == ["timeline", "owner"]
        while capturing.flush_lsn() <= through + 8192:
            database.execute("insert into t select generate_series(100, 2000)")
        with pytest.raises(RawZoneError, match=r"restored from an older copy.*pgcdc renew"):
            capturing.capture(_window(capturing), LIMITS)
        with pytest.raises(RawZoneError, match="pgcdc renew"):
            _take_snapshot(capturing)
        assert _errors(capturing) == ["owner"]
        assert capturing.confirmed() == before
        assert (capturing.rows(), capturing.captured_through()) == (rows, through)

        renewed = renew_epoch(capturing.settings, zone, capturing.slot, "pub", slot_policy=POLICY)
        assert (renewed.epoch, renewed.timeline) == (epoch + 1, 1)
        with pytest.raises(ConfigurationError, match="extra does not exist"):
            _take_snapshot(capturing, EXTRA)
        assert _errors(capturing) == []


def test_a_server_restored_without_heartbeats_shares_no_wal_with_the_epochs_before(
    own_server: EmbeddedServer, zone: RawZone, tmp_path: Path
) -> None:
    """B16: only the shorter WAL shows the restore, and the LSNs are used again."""
    server, copy = own_server.start(), tmp_path / "copy"
    capturing = _capturing(server, zone)
    capturing.begin("create table t (id int primary key)")
    server.stop()
    _copy(server.data_dir, copy)
    server.start()
    capturing = _capturing(server, zone)
    capturing.database.execute("insert into t select generate_series(1, 20000)")
    capturing.capture()
    server.stop()
    _copy(copy, server.data_dir)
    server.start()
    capturing = _capturing(server, zone)
    assert capturing.flush_lsn() < capturing.captured_through()
    renewed = renew_epoch(capturing.settings, zone, capturing.slot, "pub")
    assert (renewed.epoch, renewed.timeline, renewed.shared_through) == (2, 1, Lsn(0))
