"""Prepared transactions land once, at their COMMIT PREPARED, over restarts of the capture."""

from __future__ import annotations

import pytest

from pgcdc_assets.postgres.stream.plugin_options import Streaming
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.prepared import capture, stored_gids, stored_row_count

pytestmark = [pytest.mark.postgres]


@pytest.fixture
def begun(capturing: Capturing) -> Capturing:
    """Return a capture of a table, whose slot has two_phase already."""
    if int(capturing.database.value("show server_version_num")) < 150000:
        pytest.skip("two_phase requires Postgres 15")
    capturing.begin("create table t (id int primary key, note text)")
    capturing.database.execute("insert into t values (0, 'before')")
    capture(capturing)
    return capturing


@pytest.mark.every_pg
def test_a_transaction_lands_at_its_commit_in_a_later_session(begun: Capturing) -> None:
    database = begun.database
    database.prepare("g", "insert into t values (1, 'a')", "update t set note = 'b' where id = 1")
    database.execute("insert into t values (2, 'between')")
    capture(begun)
    assert begun.texts("t") == [["0", "before"], ["2", "between"]]
    assert stored_gids(begun) == ["g"]
    assert begun.confirmed() == begun.captured_through()

    database.end_prepared("g")
    commit_lsn_is_above = begun.captured_through()
    report = capture(begun)
    assert report.row_count == 2
    assert begun.texts("t")[2:] == [["1", "a"], ["1", "b"]]
    rows = begun.rows()[2:]
    assert [row["ordinal"] for row in rows] == [0, 1]
    assert all(row["commit_lsn"] >= commit_lsn_is_above for row in rows)
    assert stored_gids(begun) == []
    assert stored_row_count(begun) == 0


def test_a_rollback_drops_the_rows(begun: Capturing) -> None:
    begun.database.prepare("g", "insert into t values (1, 'a')")
    capture(begun)
    assert stored_gids(begun) == ["g"]
    begun.database.end_prepared("g", "rollback")
    begun.database.execute("insert into t values (2, 'after')")
    capture(begun)
    assert begun.texts("t") == [["0", "before"], ["2", "after"]]
    assert stored_row_count(begun) == 0


@pytest.mark.parametrize("mode", [Streaming.OFF, Streaming.ON])
def test_within_a_window_nothing_is_stored(begun: Capturing, mode: Streaming) -> None:
    begun.database.prepare("g", "insert into t values (1, 'a')", end="commit")
    begun.database.prepare("g", "insert into t values (2, 'b')", end="rollback")
    begun.database.prepare("g", "insert into t values (3, 'c')", end="commit")
    capture(begun, streaming=mode)
    assert begun.texts("t") == [["0", "before"], ["1", "a"], ["3", "c"]]
    table = begun.zone.prepared.table.load()
    assert table is not None
    assert table.version() == 1
