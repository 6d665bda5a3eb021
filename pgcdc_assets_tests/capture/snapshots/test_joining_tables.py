"""Tables that are added to a publication during the capture, and tables that leave again."""

from __future__ import annotations

import signal

import pytest

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.capture.test_partitions import replayed
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.handover import copied_rows
from pgcdc_assets_tests.support.snapshot_copies import PAGE_BYTES, act_before_range
from pgcdc_assets_tests.support.snapshot_process import run_snapshot_process

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

_JOINED = (
    "create table u (id int primary key, note text);"
    "insert into u select i, repeat(md5(i::text), 20) from generate_series(1, 1000) i;"
    "alter publication pub add table u"
)


def _start(capturing: Capturing) -> None:
    execute = capturing.database.execute
    execute("create table t (id int primary key); insert into t values (1)")
    execute("create publication pub for table t")
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")


def _is_complete(capturing: Capturing) -> bool:
    """Return whether the snapshot and the landed changes of `u` result in the source's rows."""
    [snapshot] = [s for s in capturing.zone.snapshots.complete_snapshots() if s.table == "u"]
    copied = copied_rows(capturing.zone, "u", snapshot.snapshot_lsn)
    found = replayed(capturing, copied, "u", (0,), int(snapshot.snapshot_lsn))
    rows = capturing.database.query("select id::text, note from u")
    return found == sorted(map(list, rows), key=repr)


@pytest.mark.sampled
def test_an_added_table_is_complete_and_delays_no_other_table(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C9: changes of the table are landed before, during and after its snapshot."""
    _start(capturing)
    execute = capturing.database.execute
    execute(_JOINED)
    execute(
        "delete from u where id = 1; insert into u values (2000, 'x'); insert into t values (2)"
    )
    capturing.capture()

    def write_and_capture() -> None:
        execute("update u set note = 'changed' where id in (2, 990); delete from u where id = 3")
        execute("insert into u values (2001, 'y'); insert into t values (3)")
        window = capturing.window()
        assert capturing.capture(window).counts["public.t"] == {"I": 1}
        assert capturing.confirmed() == window.end

    reads = act_before_range(monkeypatch, write_and_capture)
    policy = SnapshotPolicy(1, 4 * PAGE_BYTES)
    [report] = snapshot_tables(
        capturing.settings, capturing.zone, capturing.slot, "pub", policy=policy
    )
    assert (report.table, len(reads) > 3) == ("u", True)
    execute("delete from u where id in (4, 2001); insert into u values (3, 'again')")
    capturing.capture()
    assert _is_complete(capturing)
    assert capturing.texts("t") == [["2"], ["3"]]


@pytest.mark.sampled
def test_a_table_that_leaves_during_its_snapshot_leaves_no_rows(capturing: Capturing) -> None:
    """C10: its snapshot is killed, the table is dropped, and a new table gets the name."""
    _start(capturing)
    execute, zone = capturing.database.execute, capturing.zone
    execute(_JOINED)
    killed = run_snapshot_process(capturing.database, zone, capturing.slot, "mid_copy:3")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [s.table for s in zone.snapshots.complete_snapshots()] == ["t"]
    assert len(zone.ranges.all()) == 2

    execute("insert into u values (5000, 'x'); alter publication pub drop table u; drop table u")
    execute("insert into t values (2)")
    capturing.capture()
    assert snapshot_tables(capturing.settings, zone, capturing.slot, "pub") == []
    assert capturing.texts("t") == [["2"]]

    execute("create table u (id int primary key, note text); insert into u values (1, 'new')")
    execute("alter publication pub add table u")
    [report] = snapshot_tables(
        capturing.settings, zone, capturing.slot, "pub", [TableName("public", "u")]
    )
    execute("insert into u values (2, 'later')")
    capturing.capture()
    assert (report.row_count, report.ranges_continued) == (1, 0)
    assert _is_complete(capturing)
    assert zone.ranges.all() == []
    slots = capturing.database.query(
        "select slot_name from pg_replication_slots where database = current_database()"
    )
    assert slots == [(capturing.slot,)]
