"""A source that is a standby, whose own primary is replaced by a promoted standby."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.wal.timelines import server_timeline
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import NAME, Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.server_folder import new_server_folder
from pgcdc_assets_tests.support.servers import SETTINGS
from pgcdc_assets_tests.support.standby import start_standby, wait_for_replay
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.sampled]


def test_a_stream_continues_when_its_standby_follows_to_another_timeline(lake: Lake) -> None:
    """B16, B17: the former timeline beside a later LSN would stop the next capture."""
    if binaries(18) is None:
        pytest.skip("Postgres 18 is not installed")
    folder = new_server_folder("followed")
    # A base backup of a standby needs whole pages.
    settings = {**SETTINGS, "hot_standby_feedback": "on", "full_page_writes": "on"}
    primary, upstream, standby = (EmbeddedServer(folder / name, 18, settings) for name in "pqr")
    try:
        primary.start()
        old, new, source = (Database(each, "postgres") for each in (primary, upstream, standby))
        old.execute("create table t (id int primary key); create publication pub for table t")
        start_standby(primary, upstream, "q")
        start_standby(upstream, standby, "r")
        wait_for_replay(old, source)
        zone = RawZone(lake, NAME)
        capturing = Capturing(source, zone, "s", source.conninfo)
        snapshot_tables(replace(source.settings(), primary=old.settings()), zone, "s", "pub")

        def window(written: Database, number: int) -> LsnWindow:
            written.execute("insert into t values (%s)", (number,))
            return LsnWindow.of(1, capturing.captured_through(), wait_for_replay(written, source))

        def has_followed() -> bool:
            with server_timeline(capturing.settings) as server:
                return server.number == 2

        with capturing.session() as session:
            session.land(window(old, 1))
            assert zone.changes.captured_on(1)[1] == 1
            # The function waits for the end of the promotion.
            assert new.value("select pg_promote()")
            wait_until(has_followed, "the standby to follow")
            session.land(window(new, 2))
            assert session.finish()
        assert zone.changes.captured_on(1)[1] == 2
        capturing.capture(window(new, 3))
        assert capturing.texts("t") == [["1"], ["2"], ["3"]]
    finally:
        for server in (primary, upstream, standby):
            server.remove()
        folder.rmdir()
