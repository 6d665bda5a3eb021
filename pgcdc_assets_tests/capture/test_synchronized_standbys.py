"""A stream that waits for a standby of `synchronized_standby_slots` (Postgres 17)."""

from __future__ import annotations

import threading

import pytest

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.progress import Notice, Report
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.preflight.options import examine_options
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SlotPolicy, StreamPolicy
from pgcdc_assets_tests.support.captures import NAME, Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg(since=17)]

SAYS = r"(?s)The server reports: .*absent.*start the standby, or take its slot out"


@pytest.fixture
def waiting(own_server: EmbeddedServer, lake: Lake) -> Capturing:
    """Return a capture with a row, whose stream waits for a standby that is not connected."""
    own_server.start()
    database = Database(own_server, "postgres")
    database.execute("create table t (id int primary key)")
    database.execute("create publication pub for all tables")
    database.query("select pg_create_logical_replication_slot('s', 'pgoutput', false, false, true)")
    start = database.value("select confirmed_flush_lsn::text from pg_replication_slots")
    database.query("select pg_create_physical_replication_slot('absent')")
    database.execute("alter system set synchronized_standby_slots = 'absent'")
    database.query("select pg_reload_conf()")
    database.execute("insert into t values (1)")
    capturing = Capturing(database, RawZone(lake, NAME), "s", database.conninfo)
    return capturing.record_epoch(Lsn.parse(start))


@pytest.mark.sampled
@pytest.mark.usefixtures("wire")
def test_the_capture_continues_when_the_standby_is_there(waiting: Capturing) -> None:
    """The server's warning has the SQLSTATE of the warning about a missing publication."""
    window, reports = waiting.window(), list[Report]()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with CaptureSession(
                waiting.settings, waiting.zone, "s", "pub", on_report=reports.append
            ) as session:
                session.land(window)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(
        lambda: failures or any(isinstance(report, Notice) for report in reports),
        "the capture to say what it waits for",
    )
    assert waiting.rows() == []
    with query_connection(waiting.settings, "test") as conn:
        [finding] = examine_options(conn, SlotPolicy(failover=True), StreamPolicy())
    assert "names absent, which no standby uses" in finding.message
    waiting.database.execute("alter system reset synchronized_standby_slots")
    waiting.database.query("select pg_reload_conf()")
    thread.join(60)
    assert failures == []
    assert waiting.texts("t") == [["1"]]
    [notice] = [str(report) for report in reports if isinstance(report, Notice)]
    assert "absent" in notice
    assert "slot s, which has failover" in notice


def test_the_error_at_the_limit_names_the_standby(waiting: Capturing) -> None:
    with pytest.raises(TransientError, match=SAYS):
        waiting.capture(limits=CaptureLimits(total_seconds=3))
    assert waiting.rows() == []
