"""Two standbys that were promoted separately have timelines of the same number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import NAME, Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.server_folder import new_server_folder
from pgcdc_assets_tests.support.servers import SETTINGS
from pgcdc_assets_tests.support.standby import start_standby, wait_for_replay

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.sampled]

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

    with pytest.raises(RawZoneError, match=r"timeline 2 .* promoted or restored separately"):
        moved.capture()
    renewed = renew_epoch(moved.settings, zone, "s", "pub")
    assert (renewed.epoch, renewed.timeline, renewed.shared_through) == (2, 2, Lsn(0))
