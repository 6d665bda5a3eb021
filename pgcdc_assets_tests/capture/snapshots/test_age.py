"""The age of the server's snapshot has a limit, after which a new snapshot is used (C15)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from pgcdc_assets.capture.snapshots.export import export_later
from pgcdc_assets.capture.snapshots.limits import SnapshotLimits
from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table
from pgcdc_assets.capture.snapshots.table_copy import SnapshotProgress
from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.copy.reader import SnapshotReader, hold_snapshot
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets.postgres.snapshots.age import read_held_snapshot, read_warning_age
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.handover import copied_rows, replay, writers
from pgcdc_assets_tests.support.resumed_copies import (
    PAGE,
    STATEMENTS,
    TABLE,
    copy_t,
    is_exact,
    slot_of,
    source_rows,
)
from pgcdc_assets_tests.support.snapshot_copies import act_before_range
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


def _exceeded_in_the_first(count: int) -> Callable[[SnapshotLimits], str | None]:
    """Return a check that reports an exceeded limit after each range of the first snapshots."""
    snapshots: list[SnapshotLimits] = []

    def exceeded(limits: SnapshotLimits) -> str | None:
        if not any(limits is known for known in snapshots):
            snapshots.append(limits)
        return "a limit" if limits in snapshots[:count] else None

    return exceeded


@pytest.mark.sampled
def test_a_long_snapshot_run_uses_several_snapshots_of_the_server(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """C15: the server's snapshot is released after `snapshot.max_seconds`."""
    database.execute(TABLE.format(rows=1000))
    lsns = []
    original = export_later

    def counted(*arguments: Any) -> Any:
        lsns.append(arguments)
        return original(*arguments)

    monkeypatch.setattr("pgcdc_assets.capture.snapshots.export.export_later", counted)
    monkeypatch.setattr(SnapshotLimits, "exceeded", property(_exceeded_in_the_first(3)))
    policy = SnapshotPolicy(2, 8 * PAGE, max_seconds=60)
    with writers(database, 2, seed, STATEMENTS, key_count=1200):
        report = copy_t(database, zone, policy=policy)
    assert isinstance(report, SnapshotReport), report
    # The first snapshot is that of the slot.
    assert len(lsns) == 3
    assert report.ranges_continued >= 6
    rows = copied_rows(zone, "t", report.snapshot_lsn)
    assert replay(database, slot_of(database), rows, report.snapshot_lsn) == source_rows(database)


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        (SnapshotPolicy(1, 16 * PAGE, max_seconds=1e-6), "snapshot.max_seconds (1e-06)"),
        (SnapshotPolicy(1, 16 * PAGE, max_xmin_age=1), "snapshot.max_xmin_age (1 transactions)"),
    ],
)
def test_a_run_with_a_low_limit_fails_and_keeps_its_ranges(
    database: Database,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: SnapshotPolicy,
    limit: str,
) -> None:
    """C15."""
    database.execute(TABLE.format(rows=400))
    original = SnapshotReader.read_xmin_age

    def measured(reader: SnapshotReader, xmin: int) -> int | None:
        database.value("select pg_current_xact_id()")
        return original(reader, xmin)

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotReader, "read_xmin_age", measured)
        outcome = copy_t(database, zone, policy=policy)
    assert isinstance(outcome, SnapshotFailure)
    assert isinstance(outcome.error, TransientError)
    assert f"within {limit}, twice" in str(outcome.error)
    ranges = len(zone.ranges.all())
    assert ranges >= 3
    # A snapshot of the server for each range, and two that bring one range up to date each.
    assert caplog.text.count("continues in a new one") == ranges + 1
    report = copy_t(database, zone, policy=SnapshotPolicy(1, 16 * PAGE))
    assert is_exact(database, zone, report)


def test_a_snapshot_of_the_server_ends_at_the_age_in_transactions(
    database: Database,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C15: the age is reported, and the next ranges are read in a newer snapshot."""
    database.execute(TABLE.format(rows=400))
    seen: list[SnapshotProgress] = []

    def assign_ids() -> None:
        with database.connect() as conn, conn.cursor() as cursor:
            for _ in range(70):
                cursor.execute("select pg_current_xact_id()")

    act_before_range(monkeypatch, assign_ids)
    with caplog.at_level(logging.WARNING):
        [report] = snapshot_each_table(
            database.settings(),
            zone,
            slot_of(database),
            "pub",
            policy=SnapshotPolicy(1, 4 * PAGE, max_xmin_age=60),
            on_progress=seen.append,
        )
    assert is_exact(database, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued == 3
    assert "has reached snapshot.max_xmin_age (60 transactions)" in caplog.text
    old = [progress.age.transactions >= 60 for progress in seen]
    assert old == [number == 2 for number in range(len(seen))]
    assert f"{seen[2].age.transactions} transactions old" in str(seen[2])
    assert report.age is not None
    assert report.age.transactions < 60


def test_vacuum_removes_rows_between_two_snapshots_of_a_run(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C15: rows that are deleted while the first snapshot is held stay until it is released."""
    database.execute(TABLE.format(rows=400))
    removed: list[int] = []

    def vacuum() -> None:
        with database.connect() as conn:
            with conn.cursor() as cursor:
                cursor.execute("vacuum (verbose) t")
            (count,) = re.findall(r"tuples: (\d+) removed", "".join(conn.notices))[:1]
            removed.append(int(count))

    def delete() -> None:
        database.execute("delete from t where id <= 50")
        for _ in range(70):
            database.value("select pg_current_xact_id()")
        vacuum()

    act_before_range(monkeypatch, delete)
    act_before_range(monkeypatch, vacuum, number=4)
    report = copy_t(database, zone, policy=SnapshotPolicy(1, 4 * PAGE, max_xmin_age=60))
    assert is_exact(database, zone, report)
    assert removed == [0, 50]


def test_the_age_of_a_held_snapshot_is_that_of_the_oldest_session(database: Database) -> None:
    """C15: `pgcdc status` shows the age, and other sessions do not count."""
    settings = database.settings()
    with query_connection(settings, "status") as conn:
        assert read_held_snapshot(conn, settings) is None
        with create_slot(settings, slot_of(database), temporary=True) as made:
            held = hold_snapshot(settings, made.snapshot_name)
            held.__enter__()
        with database.connect(autocommit=False) as other, other.cursor() as cursor:
            cursor.execute("select pg_current_xact_id()")
            before = read_held_snapshot(conn, settings)
            for _ in range(5):
                database.value("select pg_current_xact_id()")
            after = read_held_snapshot(conn, settings)
        held.__exit__(None, None, None)
        assert before is not None and after is not None
        assert after.transactions >= before.transactions + 5
        assert after.seconds > before.seconds >= 0
        wait_until(lambda: read_held_snapshot(conn, settings) is None, "the end of the session")


def test_the_default_limit_is_half_of_the_age_at_which_the_server_warns(
    database: Database,
) -> None:
    with query_connection(database.settings(), "test") as conn:
        warning = read_warning_age(conn)
    assert warning == 200_000_000
    limits = SnapshotLimits.of(SnapshotPolicy(), 7, warning)
    limits.transactions = 99_999_999
    assert limits.exceeded is None
    limits.transactions += 1
    assert limits.exceeded == "half of autovacuum_freeze_max_age (100000000 transactions)"


def test_a_limit_of_zero_transactions_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"snapshot\.max_xmin_age must be above zero"):
        SnapshotPolicy(max_xmin_age=0)
