"""A killed snapshot is resumed with the missing ranges, and is exact at its new LSN (C3)."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.activity import Activity, watched_by
from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table
from pgcdc_assets.capture.snapshots.table_copy import SnapshotProgress
from pgcdc_assets.demo.server import EmbeddedServer, StopMode
from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.delta.scan import data_files
from pgcdc_assets.raw.snapshots import SnapshotLanding
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets_tests.support.database import Database, create_database
from pgcdc_assets_tests.support.handover import copied_rows, replay, writers
from pgcdc_assets_tests.support.resumed_copies import (
    PAGE,
    STATEMENTS,
    TABLE,
    T,
    copy_t,
    is_exact,
    slot_of,
    source_rows,
)
from pgcdc_assets_tests.support.snapshot_process import run_snapshot_process

pytestmark = pytest.mark.postgres


def _interrupted(database: Database, zone: RawZone, rows: int = 400, ranges: int = 4) -> None:
    """Create table `t` with about ten ranges, and interrupt its snapshot."""
    database.execute(TABLE.format(rows=rows))
    assert copy_t(database, zone, interrupt_after=ranges) is None
    assert len(zone.ranges.all()) >= ranges
    assert zone.snapshots.complete_snapshots() == []


@pytest.mark.soak
def test_a_snapshot_that_is_killed_repeatedly_is_exact_while_writers_continue(
    database: Database, zone: RawZone, seed: int
) -> None:
    """C2, C3: rows with unchanged TOAST move between ranges, change keys, and are deleted."""
    database.execute(TABLE.format(rows=1500))
    choose = random.Random(seed)
    parallelism = choose.choice([1, 3])
    slot, range_bytes = slot_of(database), 12 * PAGE
    # Each entry gets the number of ranges that the runs before have recorded, which the third run
    # brings to its snapshot.
    failpoints: list[Callable[[int], str]] = [
        lambda _: f"after_range_commit:{choose.randint(2, 6)}",
        lambda _: f"{choose.choice(['before_range_commit', 'mid_copy'])}:{choose.randint(2, 4)}",
        lambda ranges: f"after_range_refresh:{choose.randint(1, min(6, ranges))}",
        lambda _: "before_copy_commit",
    ]
    recorded = [0]
    with writers(database, 2, seed, STATEMENTS, key_count=1800):
        for failpoint in failpoints:
            done = run_snapshot_process(
                database,
                zone,
                slot,
                failpoint(recorded[-1]),
                parallelism=parallelism,
                range_bytes=range_bytes,
                tables=("t",),
            )
            assert done.returncode == -signal.SIGKILL, done.stderr
            recorded.append(len(zone.ranges.all()))
            assert zone.snapshots.complete_snapshots() == []
            database.execute("vacuum t")
        policy = SnapshotPolicy(parallelism, range_bytes)
        report = copy_t(database, zone, policy=policy)
    assert isinstance(report, SnapshotReport), report
    assert recorded == sorted(recorded)
    assert report.ranges_continued >= 10
    assert zone.ranges.all() == []
    rows = copied_rows(zone, "t", report.snapshot_lsn)
    assert len(rows) == report.row_count
    assert replay(database, slot, rows, report.snapshot_lsn) == source_rows(database)


@pytest.mark.sampled
@pytest.mark.every_pg
def test_rows_that_change_after_their_range_was_read_are_exact(
    database: Database, zone: RawZone
) -> None:
    """C3: each kind of change, in a range that was read and in a range that was not read."""
    _interrupted(database, zone)
    last_read = max(landed.end_page or 0 for landed in zone.ranges.all())

    def ids(condition: str) -> list[int]:
        found = database.query(f"select id from t where {condition} order by id", ())
        return [row[0] for row in found]

    read = ids(f"ctid < '({last_read},0)'")
    unread = ids(f"ctid >= '({last_read},0)'")
    assert len(read) > 100
    assert len(unread) > 100
    # Free space on the first pages, so that rows move to these pages.
    database.execute("delete from t where id = any(%s)", (read[:50],))
    database.execute("vacuum t")
    database.execute(
        "update t set n = 1, pad = repeat('m', 690) where id = any(%s)", (unread[:20],)
    )
    database.execute(
        "update t set n = 2, pad = repeat('m', 1900) where id = any(%s)", (read[60:80],)
    )
    database.execute("update t set id = -id where id = any(%s)", (read[80:90] + unread[30:40],))
    database.execute("delete from t where id = any(%s)", (unread[40:50],))
    database.execute("insert into t select i, 9, 'new', 'new' from generate_series(7000, 7200) i")
    moved = ids(f"ctid < '({last_read},0)'")
    assert set(moved) & set(unread[:20]), "no row has moved to a range that was read"
    assert set(read[60:80]) - set(moved), "no row has moved out of a range that was read"
    report = copy_t(database, zone)
    assert is_exact(database, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued >= 4
    assert zone.ranges.all() == []


def test_a_key_of_two_columns_distinguishes_the_rows_of_a_range(
    database: Database, zone: RawZone
) -> None:
    """C3: each column of the key has each of its values in several rows."""
    database.execute(
        "create table t (id int, n int, pad text, primary key (id, n));"
        "alter table t alter pad set storage plain;"
        "insert into t select i / 20, i % 20, repeat('p', 700) from generate_series(0, 399) i;"
        "create publication pub for table t"
    )
    assert copy_t(database, zone, interrupt_after=4) is None
    database.execute("delete from t where (id + n) % 3 = 0; update t set id = 50 where id = n")
    report = copy_t(database, zone)
    assert isinstance(report, SnapshotReport), report
    assert report.ranges_continued >= 4
    rows = sorted(map(tuple, copied_rows(zone, "t", report.snapshot_lsn)))
    assert rows == sorted(database.query("select id::text, n::text, pad from t"))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "change",
    [
        "vacuum full t",
        "truncate t",
        "alter table t add column c int default 5; alter table t drop column c",
        "alter table t alter n type bigint",
        "alter table t replica identity full; alter table t drop constraint t_pkey",
        "alter type colour rename value 'red' to 'crimson'",
        "alter publication pub set table t where (id > 100)",
    ],
)
def test_a_snapshot_restarts_if_its_pages_cannot_be_compared(
    database: Database, zone: RawZone, change: str
) -> None:
    """C3, C13: the table was rewritten, or the texts of unchanged rows are different."""
    if "publication" in change and database.value("show server_version_num")[:2] < "15":
        pytest.skip("no row filters before Postgres 15")
    database.execute("create type colour as enum ('red', 'blue')")
    _interrupted(database, zone)
    database.execute(change)
    report = copy_t(database, zone)
    assert isinstance(report, SnapshotReport), report
    assert report.ranges_continued == 0
    assert report.row_count == database.value(
        "select count(*) from t" + (" where id > 100" if "publication" in change else "")
    )
    assert zone.ranges.all() == []


@pytest.mark.sampled
def test_ranges_from_before_a_promotion_are_read_again(
    own_server: EmbeddedServer, zone: RawZone
) -> None:
    """The promoted server may lack the transactions that the ranges were compared with."""
    database = create_database(own_server.start())
    _interrupted(database, zone)
    own_server.stop()
    (own_server.data_dir / "standby.signal").touch()
    own_server.start()
    assert database.value("select pg_promote()")
    database.execute("delete from t where id % 7 = 0")
    report = copy_t(database, zone)
    assert is_exact(database, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued == 0


def test_the_snapshot_of_a_table_without_a_key_is_not_resumed(
    database: Database, zone: RawZone
) -> None:
    """C3: equal rows cannot be distinguished."""
    database.execute(TABLE.format(rows=400))
    database.execute("alter table t replica identity full; alter table t drop constraint t_pkey")
    assert copy_t(database, zone, interrupt_after=4) is None
    assert zone.ranges.all() == []
    report = copy_t(database, zone)
    assert is_exact(database, zone, report)


@pytest.mark.sampled
def test_ranges_of_a_completed_snapshot_are_not_reused(database: Database, zone: RawZone) -> None:
    """C3: the run is killed between the commit of the rows and the removal of the ranges."""
    database.execute(TABLE.format(rows=400))
    slot = slot_of(database)
    done = run_snapshot_process(database, zone, slot, "after_copy_commit", tables=("t",))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(zone.ranges.all()) > 10
    first = zone.snapshots.complete_snapshots()
    database.execute("delete from t where id = 1")
    report = copy_t(database, zone)
    assert is_exact(database, zone, report)
    assert zone.snapshots.complete_snapshots()[0] == first[0]
    assert zone.ranges.all() == []


def test_ranges_that_two_killed_runs_have_read_are_used_once(
    database: Database, zone: RawZone
) -> None:
    """C3: neither run knew the ranges of the other, and their sizes differ."""
    _interrupted(database, zone)
    of_first = zone.ranges.all()
    zone.ranges.remove(1, T)
    assert copy_t(database, zone, policy=SnapshotPolicy(1, 3 * PAGE), interrupt_after=4) is None
    for landed in of_first:
        zone.ranges.append(landed)
    database.execute("delete from t where id % 5 = 0; update t set n = 1 where id % 9 = 2")
    report = copy_t(database, zone)
    assert is_exact(database, zone, report)
    assert isinstance(report, SnapshotReport)
    assert 1 < report.ranges_continued < 2 * len(of_first)
    assert zone.ranges.all() == []


@pytest.mark.sampled
@pytest.mark.parametrize("is_continued", [True, False])
def test_the_slower_of_two_runs_with_the_same_ranges_fails(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch, is_continued: bool
) -> None:
    """C3: its ranges belong to the completed snapshot of the other run.

    Both runs resume a snapshot, or one run resumes the ranges of the other, running run.
    """
    if is_continued:
        _interrupted(database, zone)
    else:
        database.execute(TABLE.format(rows=400))
    original = SnapshotLanding.commit
    faster: list[Any] = []

    def commit(landing: SnapshotLanding, *arguments: Any) -> int:
        if not faster:
            faster.append(None)
            faster[0] = copy_t(database, RawZone(zone.lake, zone.name))
        return original(landing, *arguments)

    monkeypatch.setattr(SnapshotLanding, "commit", commit)
    outcome = copy_t(database, zone)
    assert isinstance(outcome, SnapshotFailure)
    assert "Another process has completed the snapshot of public.t" in str(outcome.error)
    assert len(zone.snapshots.complete_snapshots()) == 1
    assert is_exact(database, zone, faster[0])


def test_a_range_with_a_missing_file_is_read_again(database: Database, zone: RawZone) -> None:
    _interrupted(database, zone)
    lost = zone.ranges.all()[1]
    Path(zone.snapshots.table.uri, lost.files[0].path).unlink()
    report = copy_t(database, zone)
    assert is_exact(database, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued == 3
    assert report.bytes > 400 * (80 * 32 + 700)


@pytest.mark.sampled
@pytest.mark.parametrize("count", [1, 3])
def test_a_terminated_snapshot_ends_soon_and_keeps_its_ranges(
    database: Database, zone: RawZone, count: int
) -> None:
    """C12: the run is terminated in the UI; the next run continues."""
    database.execute(TABLE.format(rows=400))
    failpoint = f"after_range_commit:{count}:TERM"
    done = run_snapshot_process(database, zone, slot_of(database), failpoint, parallelism=2)
    assert "KeyboardInterrupt" in done.stderr
    assert len(zone.ranges.all()) >= count
    assert not database.query(
        "select pid from pg_stat_activity where application_name like 'pgcdc copy%'"
    )
    report = copy_t(database, zone)
    assert is_exact(database, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued >= count


def test_progress_is_reported_after_each_range(database: Database, zone: RawZone) -> None:
    """A table of one range has no progress. The copy of a table is one activity."""
    database.execute(TABLE.format(rows=400))
    database.execute(
        "create table small (id int primary key); alter publication pub add table small"
    )
    seen: list[SnapshotProgress] = []
    watcher = _Watcher()
    with watched_by(watcher):
        outcomes = snapshot_each_table(
            database.settings(),
            zone,
            slot_of(database),
            "pub",
            policy=SnapshotPolicy(2, 8 * PAGE),
            on_progress=seen.append,
        )
        [report] = (outcome for outcome in outcomes if outcome.name == T)
    shown = sorted((each.name, each.count) for each in watcher.begun)
    assert shown == [("snapshot of public.small", 0), ("snapshot of public.t", 400)]
    assert isinstance(report, SnapshotReport)
    assert {progress.name for progress in seen} == {T}
    assert [p.ranges_done for p in seen] == list(range(1, report.ranges + 1))
    assert seen[-1].row_count == 400
    assert seen[-1].seconds_left == 0
    assert str(seen[0]).startswith(f"Copied 1 of {report.ranges} ranges of public.t: ")
    loaded = zone.snapshots.table.load()
    assert loaded is not None
    assert sum(file.row_count or 0 for file in data_files(loaded)) == 400


class _Watcher:
    """Watcher that keeps the activities."""

    def __init__(self) -> None:
        self.begun: list[Activity] = []

    def began(self, activity: Activity) -> None:
        """Keep an activity."""
        self.begun.append(activity)

    def ended(self, activity: Activity) -> None:
        """Ignore the end."""

    def noticed(self, text: str) -> None:
        """Ignore a notice."""


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_restarts_during_a_snapshot_loses_no_row(
    own_server: EmbeddedServer, zone: RawZone, monkeypatch: pytest.MonkeyPatch, mode: StopMode
) -> None:
    """B2: the run fails cleanly or ends, and the next one is exact."""
    own_server.start()
    database = create_database(own_server, "source")
    database.execute(TABLE.format(rows=400))
    reach = failpoints.reach
    restarted: list[str] = []

    def restart_once(name: str) -> None:
        reach(name)
        if name == failpoints.AFTER_RANGE_COMMIT and not restarted:
            restarted.append(name)
            own_server.restart(mode)

    monkeypatch.setattr(failpoints, "reach", restart_once)
    failure: object = None
    try:
        failure = copy_t(database, zone)
    except TransientError as error:
        failure = error
    assert restarted
    assert isinstance(failure, SnapshotFailure | TransientError)
    assert zone.snapshots.complete_snapshots() == []
    database.execute("update t set n = n + 1 where id % 7 = 0; delete from t where id % 11 = 0")
    assert is_exact(database, zone, copy_t(database, zone))
