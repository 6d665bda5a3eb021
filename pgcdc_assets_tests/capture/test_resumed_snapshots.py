"""A killed snapshot continues with the ranges that are left, and is exact at its new LSN (C3)."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.capture import snapshot
from pgcdc_assets.capture.snapshot import snapshot_each_table
from pgcdc_assets.capture.snapshot_pool import SnapshotFailure, SnapshotPool, SnapshotReport
from pgcdc_assets.capture.table_copy import SnapshotProgress
from pgcdc_assets.errors import TransientError
from pgcdc_assets.policies import SnapshotPolicy
from pgcdc_assets.raw.scan import data_files
from pgcdc_assets.raw.snapshots import SnapshotLanding
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.handover import copied_rows, replay, writers
from pgcdc_assets_tests.support.snapshot_process import run_snapshot_process

pytestmark = pytest.mark.postgres

_PAGE = 8192
_T = TableName("public", "t")

# About ten rows a page, and a value outside the row that most updates leave unchanged.
_TABLE = """
create table t (id int primary key, n int, note text, pad text);
alter table t alter note set storage external, alter pad set storage plain;
insert into t select i, 0, repeat(md5(i::text), 80), repeat('p', 700)
  from generate_series(1, {rows}) i;
create publication pub for table t
"""

_STATEMENTS = (
    "insert into t select %s, 0, repeat(md5(random()::text), 80), repeat('i', 600) "
    "on conflict do nothing",
    "update t set n = n + 1 where id = %s",
    # The row finds no room on its page, and moves to an earlier or a later one.
    "update t set n = n + 1, pad = repeat('m', 200 + (random() * 1800)::int) where id = %s",
    "update t set note = repeat(md5(random()::text), 80) where id = %s",
    "update t set id = -id where id = %s and not exists (select from t x where x.id = -t.id)",
    "delete from t where id = %s",
)


def _slot(database: Database) -> str:
    return f"s_{database.name}"


def _source(database: Database) -> dict[str | None, list[str | None]]:
    rows = database.query("select id::text, n::text, note, pad from t")
    return {row[0]: list(row) for row in rows}


class _Interrupted(Exception):
    """Stands for the end of a run."""


def _copy(
    database: Database,
    zone: RawZone,
    *,
    interrupt_after: int | None = None,
    policy: SnapshotPolicy | None = None,
) -> SnapshotReport | SnapshotFailure | None:
    """Copy table `t` in this process; return None if the copy was interrupted.

    Args:
        interrupt_after: interrupt the copy after so many ranges.
    """
    done = []

    def count(progress: SnapshotProgress) -> None:
        done.append(progress)
        if len(done) == interrupt_after:
            raise _Interrupted

    try:
        [outcome] = snapshot_each_table(
            database.settings(),
            zone,
            _slot(database),
            "pub",
            [_T],
            policy=policy or SnapshotPolicy(1, 4 * _PAGE),
            on_progress=count,
        )
    except _Interrupted:
        return None
    return outcome


def _interrupted(database: Database, zone: RawZone, rows: int = 400, ranges: int = 4) -> None:
    """Make table `t` of about ten ranges, and interrupt its copy."""
    database.execute(_TABLE.format(rows=rows))
    assert _copy(database, zone, interrupt_after=ranges) is None
    assert len(zone.ranges.all()) >= ranges
    assert zone.snapshots.complete_snapshots() == []


def _is_exact(database: Database, zone: RawZone, outcome: object) -> bool:
    """Return whether the copy of a table that did not change since has the rows of the source."""
    assert isinstance(outcome, SnapshotReport), outcome
    rows = copied_rows(zone, "t", outcome.snapshot_lsn)
    assert len(rows) == outcome.row_count
    return {row[0]: row for row in rows} == _source(database)


@pytest.mark.slow
def test_a_copy_that_is_killed_again_and_again_is_exact_while_writers_continue(
    database: Database, zone: RawZone, seed: int
) -> None:
    """C2, C3: rows move between ranges with unchanged TOAST values, change keys, and go."""
    database.execute(_TABLE.format(rows=1500))
    choose = random.Random(seed)
    parallelism = choose.choice([1, 3])
    slot, range_bytes = _slot(database), 12 * _PAGE
    failpoints = [
        f"after_range_commit:{choose.randint(2, 6)}",
        f"{choose.choice(['before_range_commit', 'mid_copy'])}:{choose.randint(2, 4)}",
        f"after_range_refresh:{choose.randint(1, 6)}",
        "before_copy_commit",
    ]
    recorded = []
    with writers(database, 2, seed, _STATEMENTS, key_count=1800):
        for failpoint in failpoints:
            done = run_snapshot_process(
                database,
                zone,
                slot,
                failpoint,
                parallelism=parallelism,
                range_bytes=range_bytes,
                tables=("t",),
            )
            assert done.returncode == -signal.SIGKILL, done.stderr
            recorded.append(len(zone.ranges.all()))
            assert zone.snapshots.complete_snapshots() == []
            database.execute("vacuum t")
        policy = SnapshotPolicy(parallelism, range_bytes)
        report = _copy(database, zone, policy=policy)
    assert isinstance(report, SnapshotReport), report
    assert recorded == sorted(recorded)
    assert report.ranges_continued >= 10
    assert zone.ranges.all() == []
    rows = copied_rows(zone, "t", report.snapshot_lsn)
    assert len(rows) == report.row_count
    assert replay(database, slot, rows, report.snapshot_lsn) == _source(database)


@pytest.mark.every_pg
def test_rows_that_moved_changed_or_went_since_their_range_are_right(
    database: Database, zone: RawZone
) -> None:
    """C3: each kind of change alone, in a range that was read and in one that was not."""
    _interrupted(database, zone)
    last_read = max(landed.end_page or 0 for landed in zone.ranges.all())

    def ids(condition: str) -> list[int]:
        found = database.query(f"select id from t where {condition} order by id", ())
        return [row[0] for row in found]

    read = ids(f"ctid < '({last_read},0)'")
    unread = ids(f"ctid >= '({last_read},0)'")
    assert len(read) > 100
    assert len(unread) > 100
    # Room on the first pages, so that rows move there.
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
    report = _copy(database, zone)
    assert _is_exact(database, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued >= 4
    assert zone.ranges.all() == []


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
def test_a_change_after_which_pages_cannot_be_compared_starts_again(
    database: Database, zone: RawZone, change: str
) -> None:
    """C3, C13: the table was rewritten, or its unchanged rows have other texts."""
    if "publication" in change and database.value("show server_version_num")[:2] < "15":
        pytest.skip("no row filters before Postgres 15")
    database.execute("create type colour as enum ('red', 'blue')")
    _interrupted(database, zone)
    database.execute(change)
    report = _copy(database, zone)
    assert isinstance(report, SnapshotReport), report
    assert report.ranges_continued == 0
    assert report.row_count == database.value(
        "select count(*) from t" + (" where id > 100" if "publication" in change else "")
    )
    assert zone.ranges.all() == []


def test_a_table_without_a_key_is_not_continued(database: Database, zone: RawZone) -> None:
    """C3: rows that are alike cannot be told apart."""
    database.execute(_TABLE.format(rows=400))
    database.execute("alter table t replica identity full; alter table t drop constraint t_pkey")
    assert _copy(database, zone, interrupt_after=4) is None
    assert zone.ranges.all() == []
    report = _copy(database, zone)
    assert _is_exact(database, zone, report)


def test_ranges_of_a_snapshot_that_was_completed_are_not_used_again(
    database: Database, zone: RawZone
) -> None:
    """C3: killed after the commit of the rows, before the ranges were removed."""
    database.execute(_TABLE.format(rows=400))
    slot = _slot(database)
    done = run_snapshot_process(database, zone, slot, "after_copy_commit", tables=("t",))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(zone.ranges.all()) > 10
    first = zone.snapshots.complete_snapshots()
    database.execute("delete from t where id = 1")
    report = _copy(database, zone)
    assert _is_exact(database, zone, report)
    assert zone.snapshots.complete_snapshots()[0] == first[0]
    assert zone.ranges.all() == []


@pytest.mark.parametrize("is_continued", [True, False])
def test_of_two_runs_with_the_same_ranges_the_slower_fails(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch, is_continued: bool
) -> None:
    """C3: its ranges belong to the other run's snapshot, which stays as it is.

    Both continue a copy, or one continues what the other, which is at work, has read.
    """
    if is_continued:
        _interrupted(database, zone)
    else:
        database.execute(_TABLE.format(rows=400))
    original = SnapshotLanding.commit
    faster: list[Any] = []

    def commit(landing: SnapshotLanding, *arguments: Any) -> int:
        if not faster:
            faster.append(None)
            faster[0] = _copy(database, RawZone(zone.lake, zone.name))
        return original(landing, *arguments)

    monkeypatch.setattr(SnapshotLanding, "commit", commit)
    outcome = _copy(database, zone)
    assert isinstance(outcome, SnapshotFailure)
    assert "Another process has completed the snapshot of public.t" in str(outcome.error)
    assert len(zone.snapshots.complete_snapshots()) == 1
    assert _is_exact(database, zone, faster[0])


def test_a_range_whose_file_is_gone_is_read_again(database: Database, zone: RawZone) -> None:
    _interrupted(database, zone)
    lost = zone.ranges.all()[1]
    Path(zone.snapshots.table.uri, lost.files[0].path).unlink()
    report = _copy(database, zone)
    assert _is_exact(database, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued == 3


@pytest.mark.parametrize("count", [1, 3])
def test_a_terminated_copy_ends_soon_and_keeps_its_ranges(
    database: Database, zone: RawZone, count: int
) -> None:
    """C12: the run is terminated in the UI; the next run continues."""
    database.execute(_TABLE.format(rows=400))
    failpoint = f"after_range_commit:{count}:TERM"
    done = run_snapshot_process(database, zone, _slot(database), failpoint, parallelism=2)
    assert "KeyboardInterrupt" in done.stderr
    assert len(zone.ranges.all()) >= count
    assert not database.query(
        "select pid from pg_stat_activity where application_name like 'pgcdc copy%'"
    )
    report = _copy(database, zone)
    assert _is_exact(database, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued >= count


def _over_in_the_first(count: int) -> Callable[[SnapshotPool], bool]:
    """Return whether the time limit is over: after each range of the first snapshots."""
    pools: list[SnapshotPool] = []

    def is_over(pool: SnapshotPool) -> bool:
        if pool not in pools:
            pools.append(pool)
        return pools.index(pool) < count

    return is_over


def test_a_long_copy_is_cut_into_several_snapshots(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """C15: the snapshot of the server is given back after `snapshot.max_seconds`."""
    database.execute(_TABLE.format(rows=1000))
    lsns = []
    original = snapshot._temporary_snapshot

    def counted(*arguments: Any) -> Any:
        lsns.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(snapshot, "_temporary_snapshot", counted)
    monkeypatch.setattr(SnapshotPool, "is_over", property(_over_in_the_first(3)))
    policy = SnapshotPolicy(2, 8 * _PAGE, max_seconds=60)
    with writers(database, 2, seed, _STATEMENTS, key_count=1200):
        report = _copy(database, zone, policy=policy)
    assert isinstance(report, SnapshotReport), report
    # The first snapshot is the slot's.
    assert len(lsns) == 3
    assert report.ranges_continued >= 6
    rows = copied_rows(zone, "t", report.snapshot_lsn)
    assert replay(database, _slot(database), rows, report.snapshot_lsn) == _source(database)


def test_a_limit_that_is_too_short_fails_and_keeps_the_ranges(
    database: Database, zone: RawZone
) -> None:
    """C15."""
    database.execute(_TABLE.format(rows=400))
    policy = SnapshotPolicy(1, 16 * _PAGE, max_seconds=1e-6)
    outcome = _copy(database, zone, policy=policy)
    assert isinstance(outcome, SnapshotFailure)
    assert isinstance(outcome.error, TransientError)
    assert "within snapshot.max_seconds (1e-06), twice" in str(outcome.error)
    assert len(zone.ranges.all()) >= 3
    report = _copy(database, zone, policy=SnapshotPolicy(1, 16 * _PAGE))
    assert _is_exact(database, zone, report)


def test_progress_is_reported_after_each_range(database: Database, zone: RawZone) -> None:
    database.execute(_TABLE.format(rows=400))
    seen: list[SnapshotProgress] = []
    [report] = snapshot_each_table(
        database.settings(),
        zone,
        _slot(database),
        "pub",
        policy=SnapshotPolicy(2, 8 * _PAGE),
        on_progress=seen.append,
    )
    assert isinstance(report, SnapshotReport)
    assert [p.ranges_done for p in seen] == list(range(1, report.ranges + 1))
    assert seen[-1].row_count == 400
    assert seen[-1].seconds_left == 0
    assert str(seen[0]).startswith(f"Copied 1 of {report.ranges} ranges of public.t: ")
    loaded = zone.snapshots.table.load()
    assert loaded is not None
    assert sum(file.row_count for file in data_files(loaded)) == 400
