"""Two standbys that were promoted separately have timelines of the same number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.heartbeat import create_table_sql
from pgcdc_assets.postgres.libpq import execute
from pgcdc_assets.postgres.wal import timelines
from pgcdc_assets.postgres.wal.timelines import server_timeline
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import HeartbeatPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.captures import NAME, Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.server_folder import new_server_folder
from pgcdc_assets_tests.support.servers import SETTINGS
from pgcdc_assets_tests.support.standby import start_standby, wait_for_replay

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.sampled]

_BEATING = CaptureLimits(heartbeat=HeartbeatPolicy(table="public.heartbeats"))
_MUCH_WAL = "create table much_{} as select generate_series(1, 20000)"


@pytest.fixture
def promoted() -> Iterator[tuple[Database, Database]]:
    """Return two promoted standbys of one primary, the second of which had received more WAL."""
    if binaries(18) is None:
        pytest.skip("Postgres 18 is not installed")
    folder = new_server_folder("promoted")
    primary, *standbys = (EmbeddedServer(folder / name, 18, SETTINGS) for name in "pqr")
    try:
        primary.start()
        database = Database(primary, "postgres")
        database.execute("create table t (id int primary key)")
        found = []
        for standby in standbys:
            start_standby(primary, standby, standby.data_dir.name)
            found.append(Database(standby, "postgres"))
        for one in found:
            database.execute("insert into t values ((select count(*) from t))")
            wait_for_replay(database, one)
            # The function waits for the end of the promotion.
            assert one.value("select pg_promote()")
        yield found[0], found[1]
    finally:
        for server in (primary, *standbys):
            server.remove()
        folder.rmdir()


def test_a_capture_does_not_continue_on_another_standby_with_the_same_timeline(
    promoted: tuple[Database, Database], lake: Lake
) -> None:
    one, other = promoted
    zone = RawZone(lake, NAME)
    capturing = Capturing(one, zone, "s", one.conninfo).begin()
    moved = replace(capturing, database=other, conninfo=other.conninfo)
    other.execute("create publication pub for all tables")
    other.query("select pg_create_logical_replication_slot('s', 'pgoutput')")
    one.execute(_MUCH_WAL.format(1))
    one.execute("insert into t values (100)")
    capturing.capture()
    one.execute("insert into t values (101)")
    capturing.capture()
    for number in (1, 2, 3):
        other.execute(_MUCH_WAL.format(number))
    assert moved.flush_lsn() > moved.captured_through()

    for call in (
        lambda: moved.capture(),
        lambda: snapshot_tables(moved.settings, zone, "s", "pub"),
    ):
        with pytest.raises(RawZoneError, match=r"timeline 2 .* promoted or restored separately"):
            call()
    renewed = renew_epoch(moved.settings, zone, "s", "pub")
    assert (renewed.epoch, renewed.timeline, renewed.shared_through) == (2, 2, Lsn(0))


def test_a_heartbeat_distinguishes_two_standbys_that_were_promoted_at_one_lsn(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timelines of both have one number and one start, so only a row can tell them apart."""
    if binaries(18) is None:
        pytest.skip("Postgres 18 is not installed")
    primary, *standbys = (EmbeddedServer(tmp_path / name, 18, SETTINGS) for name in "pqr")
    zone = RawZone(lake, NAME)
    try:
        primary.start()
        database = Database(primary, "postgres")
        for standby in standbys:
            start_standby(primary, standby, standby.data_dir.name)
        table = create_table_sql(TableName("public", "heartbeats"))
        old = Capturing(database, zone, "s", database.conninfo)
        old.begin(table, "create table t (id int primary key)")
        with old.session(_BEATING) as session:
            session.land(old.window())
            assert session.finish()
        primary.stop()
        promoted = []
        for standby in standbys:
            own = Database(standby, "postgres")
            assert own.value("select pg_promote()")
            promoted.append(replace(old, database=own, conninfo=own.conninfo))
        one, other = promoted
        starts = [_timeline_start(each) for each in promoted]
        assert starts[0] == starts[1]
        other.database.query("select pg_create_logical_replication_slot('s', 'pgoutput')")
        renew_epoch(one.settings, zone, "s", "pub")
        snapshot_tables(one.settings, zone, "s", "pub")
        with one.session(_BEATING) as session:
            for number in (1, 2):
                one.database.execute(_MUCH_WAL.format(number))
                session.land(one.window()._replace(epoch=2))
            assert session.finish()
        asked = _record_commands(monkeypatch)
        one.capture(one.window()._replace(epoch=2))
        assert asked == [b"IDENTIFY_SYSTEM", b"TIMELINE_HISTORY 2"], "the file is read once"
        for number in (1, 2, 3):
            other.database.execute(_MUCH_WAL.format(number))
        assert other.flush_lsn() > other.captured_through()
        with pytest.raises(RawZoneError, match="restored from an older copy"):
            other.capture(other.window()._replace(epoch=2), _BEATING)
    finally:
        for server in (primary, *standbys):
            server.remove()


def _record_commands(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list to which the commands about timelines are added."""
    asked: list[bytes] = []

    def recorded(conn: Any, command: bytes, timeout_seconds: float) -> Any:
        asked.append(command)
        return execute(conn, command, timeout_seconds)

    monkeypatch.setattr(timelines, "execute", recorded)
    return asked


def _timeline_start(capturing: Capturing) -> Lsn:
    with server_timeline(capturing.settings) as server:
        return server.starts()[2]
