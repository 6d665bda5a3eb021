"""Copies read from a standby while the stream comes from the primary (C1, C2, C3)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotPool, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.snapshots.table_copy import SnapshotProgress, ignore_progress
from pgcdc_assets.errors import ConfigurationError, ConnectionLost, SnapshotEnded
from pgcdc_assets.postgres.open_writers import wait_for_writers
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets_tests.support.handover import copied_rows, replay, writers
from pgcdc_assets_tests.support.resumed_copies import (
    PAGE,
    STATEMENTS,
    TABLE,
    between_ranges,
    copy_t,
    is_exact,
    slot_of,
    source_rows,
)
from pgcdc_assets_tests.support.snapshot_process import run_snapshot_process
from pgcdc_assets_tests.support.standby import Source
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

_DOWN = "host=127.0.0.1 port=1 dbname=shop user=postgres"
_COPYING = "select count(*) from pg_stat_activity where application_name = 'pgcdc copy test'"


def _copy(
    source: Source,
    zone: RawZone,
    *,
    parallelism: int = 1,
    pages: int = 8,
    on_progress: Callable[[SnapshotProgress], None] = ignore_progress,
) -> SnapshotReport | SnapshotFailure | None:
    """Copy table `t` from the standby."""
    return copy_t(
        source.primary,
        zone,
        policy=SnapshotPolicy(parallelism, pages * PAGE),
        standby=source.standby.settings(),
        on_progress=on_progress,
    )


@pytest.mark.sampled
@pytest.mark.every_pg
def test_first_and_later_copies_of_a_standby_meet_the_stream_while_writers_write(
    source: Source, zone: RawZone, seed: int
) -> None:
    """C1, C2: the first snapshot comes after the consistent point of the new slot."""
    primary, slot = source.primary, slot_of(source.primary)
    primary.execute(TABLE.format(rows=1500))
    copying: list[tuple[int, int]] = []

    def look(progress: SnapshotProgress) -> None:
        copying.append((primary.value(_COPYING), source.standby.value(_COPYING)))

    # Replay waits, since a busy machine replays too late. Conflicts have tests of their own.
    with (
        source.standby_setting("max_standby_streaming_delay", "-1"),
        writers(primary, 2, seed, STATEMENTS, key_count=1800),
    ):
        reports = [_copy(source, zone, parallelism=2, on_progress=look) for _ in range(2)]
    assert {on_primary for on_primary, _ in copying} == {0}
    assert max(on_standby for _, on_standby in copying) == 2
    for report in reports:
        assert isinstance(report, SnapshotReport), report
        rows = copied_rows(zone, "t", report.snapshot_lsn)
        assert len(rows) == report.row_count
        assert replay(primary, slot, rows, report.snapshot_lsn) == source_rows(primary)
    [epoch] = zone.epochs.all()
    first, second = [snapshot.snapshot_lsn for snapshot in zone.snapshots.complete_snapshots()]
    assert epoch.start_lsn < first < second


@pytest.mark.sampled
def test_a_copy_that_is_in_conflict_with_the_replay_continues_in_a_new_snapshot(
    source: Source,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C3: VACUUM removes rows that the snapshot sees."""
    source.primary.execute(TABLE.format(rows=400))

    def remove_rows() -> None:
        source.primary.execute("update t set n = 5 where id < 40")
        source.remove_rows("id % 7 = 3")

    between_ranges(monkeypatch, remove_rows, 4)
    report = _copy(source, zone)
    assert is_exact(source.primary, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued == 3
    assert "was ended by a conflict with the replay of WAL" in caplog.text


@pytest.mark.sampled
def test_a_copy_whose_connection_to_the_standby_ends_continues_in_a_new_snapshot(
    source: Source,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B2, C3: the log does not call the loss a conflict."""
    source.primary.execute(TABLE.format(rows=400))
    end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"
    between_ranges(monkeypatch, lambda: source.standby.query(end, ("pgcdc copy test",)), 4)
    report = _copy(source, zone)
    assert is_exact(source.primary, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued == 3
    assert "was ended by a lost connection" in caplog.text


@pytest.mark.sampled
def test_a_table_without_a_key_fails_after_three_conflicts_and_names_the_remedy(
    source: Source, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.primary.execute(TABLE.format(rows=400))
    source.primary.execute(
        "alter table t drop constraint t_pkey; alter table t replica identity full"
    )
    ids = iter((3, 4, 5))

    def remove_rows() -> None:
        source.remove_rows(f"id % 7 = {next(ids)}")

    begun = between_ranges(monkeypatch, remove_rows, 4, 8, 12)
    failed = _copy(source, zone)
    assert isinstance(failed, SnapshotFailure)
    assert isinstance(failed.error, SnapshotEnded), failed.error
    assert "Set hot_standby_feedback = on" in str(failed.error)
    assert len(begun) == 12
    assert zone.snapshots.complete_snapshots() == []
    # Without a conflict, the next run copies the table.
    assert is_exact(source.primary, zone, _copy(source, zone))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "is_replayed"),
    [
        ("truncate t; insert into t values (1, 1, 'a', 'b')", True),
        ("alter table t alter n type bigint", True),
        ("alter publication pub drop table t; alter publication pub add table t", False),
    ],
    ids=["truncate", "rewrite", "publication"],
)
def test_a_table_that_is_altered_during_its_copy_gets_another_snapshot(
    source: Source,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: str,
    is_replayed: bool,
) -> None:
    """C13: the standby replays the change between two ranges, or has not replayed it yet."""
    source.primary.execute(TABLE.format(rows=400))
    resumed = threading.Timer(1.0, source.standby.execute, ["select pg_wal_replay_resume()"])

    def alter() -> None:
        if not is_replayed:
            source.standby.execute("select pg_wal_replay_pause()")
            resumed.start()
        source.primary.execute(change)
        if is_replayed:
            source.wait_for_replay()

    between_ranges(monkeypatch, alter, 4)
    report = _copy(source, zone)
    assert is_exact(source.primary, zone, report)
    assert "Retrying with a new snapshot" in caplog.text
    if not is_replayed:
        resumed.join()


@pytest.mark.sampled
def test_a_killed_copy_leaves_the_replay_running_and_continues_from_the_standby(
    source: Source, zone: RawZone
) -> None:
    """C3: the ranges of a standby continue on the standby, and on the primary."""
    source.primary.execute(TABLE.format(rows=400))
    done = run_snapshot_process(
        source.primary,
        zone,
        slot_of(source.primary),
        "after_range_commit:4",
        range_bytes=8 * PAGE,
        tables=("t",),
        standby=source.standby,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(zone.ranges.all()) == 4
    source.primary.execute("delete from t where id % 5 = 1; update t set n = 1 where id % 9 = 2")
    source.wait_for_replay()
    wait_until(lambda: source.standby.value(_COPYING) == 0, "the copy's sessions to end")
    report = _copy(source, zone)
    assert is_exact(source.primary, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued == 4


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["_examine", "_parts"])
def test_a_snapshot_that_ends_before_its_first_range_is_replaced(
    source: Source,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    """C3: the session that holds the snapshot ends before the connections of the copy import it."""
    source.primary.execute(TABLE.format(rows=400))
    original, ids = getattr(SnapshotPool, place), iter((3, 4))

    def end_and_continue(*arguments: Any) -> Any:
        if (rest := next(ids, None)) is not None:
            source.remove_rows(f"id % 7 = {rest}")
        return original(*arguments)

    monkeypatch.setattr(SnapshotPool, place, end_and_continue)
    assert is_exact(source.primary, zone, _copy(source, zone, parallelism=2))
    assert caplog.text.count("The snapshot of the server was ended by a conflict") == 2


@pytest.mark.sampled
@pytest.mark.parametrize("is_of_standby", [True, False])
def test_a_table_that_joins_after_the_wait_for_writers_is_left_to_the_next_copy_from_a_standby(
    source: Source, zone: RawZone, monkeypatch: pytest.MonkeyPatch, is_of_standby: bool
) -> None:
    """Nothing waits for its writers before the snapshot of a standby. A new slot waits for them."""
    primary = source.primary
    for name in "stu":
        primary.execute(f"create table {name} (id int primary key)")
    primary.execute("create publication pub for table s")
    standby = source.standby.settings() if is_of_standby else None

    def copied() -> set[str]:
        snapshot_tables(primary.settings(), zone, slot_of(primary), "pub", standby=standby)
        return {snapshot.table for snapshot in zone.snapshots.complete_snapshots()}

    assert copied() == {"s"}
    primary.execute("alter publication pub add table t")

    def join(*arguments: Any) -> Any:
        found = wait_for_writers(*arguments)
        primary.execute("alter publication pub add table u")
        return found

    with monkeypatch.context() as patched:
        patched.setattr("pgcdc_assets.capture.snapshots.export.wait_for_writers", join)
        assert copied() == ({"s", "t"} if is_of_standby else {"s", "t", "u"})
    assert copied() == {"s", "t", "u"}


def test_with_a_wrong_standby_no_slot_is_created(source: Source, zone: RawZone) -> None:
    source.primary.execute(TABLE.format(rows=1))
    wrong = Source(source.primary, source.primary)
    with pytest.raises(ConfigurationError, match=r"snapshot.dsn_env names .* is not a standby"):
        _copy(wrong, zone)
    down = replace(source.standby.settings(), conninfo=_DOWN, variable="SHOP_STANDBY")
    with pytest.raises(ConnectionLost, match="connection string is in SHOP_STANDBY"):
        snapshot_tables(
            source.primary.settings(), zone, slot_of(source.primary), "pub", standby=down
        )
    logical = "select count(*) from pg_replication_slots where slot_type = 'logical'"
    assert source.primary.value(logical) == 0
    assert zone.epochs.all() == []
