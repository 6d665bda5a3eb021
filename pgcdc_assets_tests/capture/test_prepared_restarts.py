"""Prepared transactions and the death of the capture or of the server at any step."""

from __future__ import annotations

import signal

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from pgcdc_assets import failpoints
from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import DefiniteError, RawZoneError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.stream.plugin_options import Streaming
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support import capture_failpoints
from pgcdc_assets_tests.support.captures import NAME, Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.prepared import capture, stored_gids, stored_row_count

pytestmark = [pytest.mark.postgres]


def _begin(capturing: Capturing) -> Capturing:
    if int(capturing.database.value("show server_version_num")) < 150000:
        pytest.skip("two_phase requires Postgres 15")
    return capturing.begin("create table t (id int primary key, note text)")


def _killed(capturing: Capturing, failpoint: str, streaming: Streaming) -> None:
    done = capturing.capture_process(
        capturing.window(), failpoint=failpoint, two_phase=True, streaming=streaming
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    "streaming", [pytest.param(Streaming.OFF, marks=pytest.mark.soak), Streaming.ON]
)
@pytest.mark.parametrize("failpoint", capture_failpoints.TWO_PHASE_WINDOW)
def test_killed_captures_land_each_row_once(
    capturing: Capturing, failpoint: str, streaming: Streaming
) -> None:
    """A kill in the window of the PREPARE, and another one in the window of its end."""
    _begin(capturing)
    database = capturing.database
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    fill = "insert into t select i, repeat('x', 100) from generate_series({}, {}) i"
    database.prepare("kept", fill.format(1, 900), "update t set note = 'y' where id <= 100")
    database.prepare("undone", fill.format(1001, 1900))
    database.execute("insert into t values (-1, 'between')")
    _killed(capturing, failpoint, streaming)
    capture(capturing, streaming=streaming)
    assert stored_gids(capturing) == ["kept", "undone"]

    database.end_prepared("kept")
    database.end_prepared("undone", "rollback")
    database.execute("insert into t values (-2, 'after')")
    _killed(capturing, failpoint, streaming)
    capture(capturing, streaming=streaming)
    assert stored_gids(capturing) == []

    database.execute("insert into t values (-3, 'last')")
    capture(capturing, streaming=streaming)
    rows = [(row["op"], row["new"][0]) for row in capturing.rows()]
    assert rows == [
        ("I", "-1"),
        *(("I", str(i)) for i in range(1, 901)),
        *(("U", str(i)) for i in range(1, 101)),
        ("I", "-2"),
        ("I", "-3"),
    ]
    assert capturing.confirmed() == capturing.captured_through()
    maintain_raw_zone(capturing.zone, minimum_log_entries=1)
    assert stored_row_count(capturing) == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    "failpoint", [failpoints.AFTER_TWO_PHASE_RECORDED, failpoints.AFTER_PREPARED_REMOVAL]
)
def test_a_kill_at_the_switch_and_after_the_removal(capturing: Capturing, failpoint: str) -> None:
    _begin(capturing)
    database = capturing.database
    database.prepare("early", "insert into t values (1, 'a')")
    if failpoint == failpoints.AFTER_PREPARED_REMOVAL:
        capture(capturing)
        database.end_prepared("early")
        _killed(capturing, failpoint, Streaming.OFF)
    else:
        _killed(capturing, failpoint, Streaming.OFF)
        database.end_prepared("early")
    capture(capturing, capturing.window())
    assert capturing.texts("t") == [["1", "a"]]
    assert stored_gids(capturing) == []


@pytest.mark.sampled
def test_the_server_restarts_between_prepare_and_commit(
    own_server: EmbeddedServer, lake: Lake
) -> None:
    own_server.start()
    database = Database(own_server, "postgres")
    capturing = Capturing(database, RawZone(lake, NAME), "s", database.conninfo)
    capturing.begin("create table t (id int)")
    database.prepare("g", "insert into t values (1)")
    capture(capturing)
    own_server.restart("immediate")
    capturing = Capturing(database, capturing.zone, "s", database.conninfo)
    database.prepare("h", "insert into t values (2)")
    capture(capturing)
    own_server.restart("fast")
    capturing = Capturing(database, capturing.zone, "s", database.conninfo)
    database.end_prepared("h")
    database.end_prepared("g")
    capture(capturing)
    assert capturing.texts("t") == [["2"], ["1"]]


def test_a_transaction_that_was_prepared_before_two_phase_lands_once(capturing: Capturing) -> None:
    """The server sends the rows at COMMIT PREPARED; nothing is sent if there are no rows."""
    _begin(capturing)
    database = capturing.database
    database.execute("insert into t values (0, 'locked')")
    database.prepare("early", "insert into t values (1, 'a')")
    database.prepare("locks", "select * from t for update")
    database.prepare("undone", "insert into t values (2, 'b')")
    capturing.capture()
    capture(capturing, capturing.window())
    database.prepare("late", "insert into t values (3, 'c')")
    capture(capturing)
    assert stored_gids(capturing) == ["early", "locks", "undone", "late"]
    for gid, end in (
        ("early", "commit"),
        ("locks", "commit"),
        ("undone", "rollback"),
        ("late", "commit"),
    ):
        database.end_prepared(gid, end)
        capture(capturing)
    assert capturing.texts("t") == [["0", "locked"], ["1", "a"], ["3", "c"]]
    assert stored_gids(capturing) == []


@pytest.mark.every_pg
@pytest.mark.parametrize("is_subtransaction", [True, False])
def test_a_rollback_that_the_server_cannot_decode_is_explained(
    capturing: Capturing, is_subtransaction: bool
) -> None:
    """Postgres misses the abort of a prepared subtransaction whose catalog rows are removed."""
    _begin(capturing)
    database = capturing.database
    capture(capturing)
    statements = ["truncate t", "insert into t values (1)"]
    if is_subtransaction:
        statements = ["savepoint s", *statements, "release s"]
    database.prepare("g", *statements)
    database.end_prepared("g", "rollback")
    database.execute("vacuum pg_class")
    database.execute("insert into t values (2)")
    start = capturing.confirmed()
    if not is_subtransaction:
        assert capture(capturing).row_count == 1
        return
    for _ in range(2):
        with pytest.raises(DefiniteError, match=r"could not map.*to false.*renew --name test"):
            capture(capturing)
    assert capturing.rows() == []
    assert capturing.confirmed() == start
    # The remedy: a slot without two_phase does not decode the transaction.
    database.execute("select pg_drop_replication_slot(%s)", (capturing.slot,))
    renew_epoch(capturing.settings, capturing.zone, capturing.slot, "pub")
    database.execute("insert into t values (3)")
    epoch = capturing.zone.epochs.latest()
    assert epoch is not None
    capturing.capture(LsnWindow.of(2, epoch.start_lsn, capturing.flush_lsn()))
    assert capturing.texts("t") == [["3", None]]


def test_after_the_loss_of_stored_rows_a_new_epoch_begins(capturing: Capturing) -> None:
    """The slot can continue, but the server does not send the rows again."""
    _begin(capturing)
    capturing.database.prepare("g", "insert into t values (1)")
    capture(capturing)
    uri = capturing.zone.prepared.table.uri
    stored = DeltaTable(uri).to_pyarrow_table()
    write_deltalake(uri, stored.filter(pc.field("ordinal").is_null()), mode="overwrite")
    capturing.database.end_prepared("g")
    with pytest.raises(RawZoneError, match="renew --name test"):
        capture(capturing)
    assert renew_epoch(capturing.settings, capturing.zone, capturing.slot, "pub").epoch == 2
