"""After a kill at any time, each change is in the raw zone exactly once (A2 to A7, H9)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support import capture_failpoints
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import create_database

pytestmark = pytest.mark.postgres

TABLES = """
    create table keyed (id int primary key, note text);
    create table keyless (id int, note text);
    alter table keyless replica identity full;
"""


@pytest.mark.every_pg
@pytest.mark.parametrize("failpoint", capture_failpoints.WINDOW)
def test_after_a_kill_between_two_steps_each_change_is_landed_exactly_once(
    capturing: Capturing, failpoint: str
) -> None:
    """A2, A3."""
    capturing.begin(TABLES)
    capturing.database.transaction(
        "insert into keyed values (1, 'a'), (2, 'b')",
        "insert into keyless values (1, 'a'), (1, 'a')",
        "delete from keyless where ctid = (select min(ctid) from keyless)",
    )
    window = capturing.window()

    killed = capturing.capture_process(window, failpoint=failpoint)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    is_landed = failpoint in (failpoints.AFTER_DELTA_COMMIT, failpoints.AFTER_STATUS_PACKET)
    if not is_landed:
        assert capturing.rows() == []
        assert capturing.confirmed() < window.end
    report = capturing.capture(window)

    assert report.already_captured == is_landed
    assert capturing.texts("keyed") == [["1", "a"], ["2", "b"]]
    assert [(r["op"], r["new"], r["old"]) for r in capturing.rows() if r["table"] == "keyless"] == [
        ("I", ["1", "a"], None),
        ("I", ["1", "a"], None),
        ("D", None, ["1", "a"]),
    ]
    assert len(capturing.zone.relations.versions(1)) == 2
    assert capturing.confirmed() == window.end


@pytest.mark.parametrize("failpoint", capture_failpoints.WINDOW)
def test_a_terminated_capture_leaves_a_complete_window_or_nothing(
    capturing: Capturing, failpoint: str
) -> None:
    """H9: SIGTERM arrives inside a transaction, during the landing, or after the landing."""
    capturing.begin(TABLES)
    capturing.database.execute(
        "insert into keyed select i, repeat('x', 1000) from generate_series(1, 1000) i"
    )
    window = capturing.window()

    stopped = capturing.capture_process(
        window, failpoint=f"{failpoint}:1:TERM", batch_bytes=100_000
    )
    assert stopped.returncode == -signal.SIGINT, stopped.stderr
    is_landed = failpoint in (failpoints.AFTER_DELTA_COMMIT, failpoints.AFTER_STATUS_PACKET)
    assert len(capturing.rows()) == (1000 if is_landed else 0)
    assert is_landed or capturing.confirmed() < window.end
    report = capturing.capture(window)

    assert report.already_captured == is_landed
    assert [int(text[0]) for text in capturing.texts("keyed")] == list(range(1, 1001))
    assert capturing.confirmed() == window.end


def test_a_landed_window_is_verified_and_reported_with_the_same_figures(
    capturing: Capturing,
) -> None:
    capturing.begin(TABLES)
    capturing.database.execute("insert into keyed values (1, 'a')")
    window = capturing.window()

    first = capturing.capture(window)
    again = capturing.capture(window)

    assert (first.already_captured, again.already_captured) == (False, True)
    assert (first.row_count, first.counts, first.last_commit_ts) == (
        again.row_count,
        again.counts,
        again.last_commit_ts,
    )
    assert len(capturing.rows()) == 1


def test_a_landed_and_confirmed_window_is_reported_without_its_slot(capturing: Capturing) -> None:
    """A person runs the partition again in Dagster, after the slot was dropped."""
    window = capturing.begin_with_one_insert()
    first = capturing.capture(window)
    capturing.database.execute("select pg_drop_replication_slot(%s)", (capturing.slot,))
    again = capturing.capture(window)
    assert again.already_captured
    assert (again.row_count, again.counts) == (1, first.counts)


@pytest.mark.every_pg
def test_a_lost_confirmation_causes_no_duplicates(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    """A4: the server crashes before it has persisted the slot."""
    own_server.start()
    database = create_database(own_server, "source")
    zone = RawZone(Lake(str(tmp_path / "lake")), "test")
    capturing = Capturing(database, zone, "s", database.conninfo).begin(TABLES)
    # The first confirmation also advances restart_lsn, so the server persists it.
    capturing.capture()
    database.execute("insert into keyless values (1, 'a')")
    landed = capturing.window()
    capturing.capture(landed)
    own_server.kill()
    own_server.start()
    assert capturing.confirmed() < landed.end
    database.execute("insert into keyless values (2, 'b')")

    capturing.capture()

    assert capturing.texts("keyless") == [["1", "a"], ["2", "b"]]
    assert capturing.confirmed() > landed.end


@pytest.mark.every_pg
def test_a_transaction_that_is_interrupted_in_the_stream_is_landed_completely(
    capturing: Capturing,
) -> None:
    """A5."""
    capturing.begin("create table t (id int, filler text)")
    capturing.database.transaction(
        "insert into t select i, repeat('x', 50000) from generate_series(1, 10) i"
    )
    window = capturing.window()

    killed = capturing.capture_process(
        window, failpoint=f"{failpoints.MID_STREAM}:3", batch_bytes=100_000
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert capturing.rows() == []
    finished = capturing.capture_process(window, batch_bytes=100_000)

    assert finished.stdout.split()[:2] == ["10", "False"], finished.stderr
    rows = capturing.rows()
    assert [row["new"][0] for row in rows] == [str(i) for i in range(1, 11)]
    assert [row["ordinal"] for row in rows] == list(range(10))
    assert len({(row["window"], row["commit_lsn"], row["xid"]) for row in rows}) == 1


@pytest.mark.every_pg
def test_rows_of_one_copy_statement_have_different_ordinals(capturing: Capturing) -> None:
    """A7: the rows of a COPY have the same LSN in the WAL."""
    capturing.begin("create table t (id int)")
    with capturing.database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("copy t from program 'seq 500'")

    capturing.capture()

    rows = capturing.rows()
    assert [(row["ordinal"], row["new"]) for row in rows] == [(i, [str(i + 1)]) for i in range(500)]


@pytest.mark.every_pg
def test_a_transaction_that_is_open_during_a_restart_is_landed_after_its_commit(
    capturing: Capturing,
) -> None:
    """A6."""
    capturing.begin("create table t (id int)")
    with capturing.database.connect(autocommit=False) as connection:
        with connection.cursor() as cursor:
            cursor.execute("insert into t values (1)")
            capturing.database.execute("insert into t values (2)")
            capturing.capture()
            assert capturing.texts("t") == [["2"]]
            cursor.execute("insert into t values (3)")
        connection.commit()

    capturing.capture()

    assert capturing.texts("t") == [["2"], ["1"], ["3"]]
