"""Interrupted and resumed snapshots of a table `t` in ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pgcdc_assets.capture.snapshots import pool as snapshot_pool
from pgcdc_assets.capture.snapshots import ranges as snapshot_ranges
from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table
from pgcdc_assets.capture.snapshots.table_copy import SnapshotProgress, ignore_progress
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.handover import copied_rows

PAGE = 8192
T = TableName("public", "t")

# A page has about ten rows. Most updates do not change a value that is stored out of line.
TABLE = """
create table t (id int primary key, n int, note text, pad text);
alter table t alter note set storage external, alter pad set storage plain;
insert into t select i, 0, repeat(md5(i::text), 80), repeat('p', 700)
  from generate_series(1, {rows}) i;
create publication pub for table t
"""

STATEMENTS = (
    "insert into t select %s, 0, repeat(md5(random()::text), 80), repeat('i', 600) "
    "on conflict do nothing",
    "update t set n = n + 1 where id = %s",
    # The page has no space for the row, which moves to an earlier or a later page.
    "update t set n = n + 1, pad = repeat('m', 200 + (random() * 1800)::int) where id = %s",
    "update t set note = repeat(md5(random()::text), 80) where id = %s",
    "update t set id = -id where id = %s and not exists (select from t x where x.id = -t.id)",
    "delete from t where id = %s",
)


def slot_of(database: Database) -> str:
    return f"s_{database.name}"


def source_rows(database: Database) -> dict[str | None, list[str | None]]:
    rows = database.query("select id::text, n::text, note, pad from t")
    return {row[0]: list(row) for row in rows}


class Interrupted(Exception):
    """Simulates the end of a run."""


def copy_t(
    database: Database,
    zone: RawZone,
    *,
    interrupt_after: int | None = None,
    policy: SnapshotPolicy | None = None,
    standby: ConnectionSettings | None = None,
    on_progress: Callable[[SnapshotProgress], None] = ignore_progress,
) -> SnapshotReport | SnapshotFailure | None:
    """Take a snapshot of table `t` in this process; return None after an interruption.

    Args:
        interrupt_after: number of ranges after which to interrupt the snapshot.
        standby: a standby that the rows are read from.
    """
    done = []

    def count(progress: SnapshotProgress) -> None:
        done.append(progress)
        on_progress(progress)
        if len(done) == interrupt_after:
            raise Interrupted

    try:
        [outcome] = snapshot_each_table(
            database.settings(),
            zone,
            slot_of(database),
            "pub",
            [T],
            policy=policy or SnapshotPolicy(1, 4 * PAGE),
            standby=standby,
            on_progress=count,
        )
    except Interrupted:
        return None
    return outcome


def between_ranges(
    monkeypatch: pytest.MonkeyPatch, hook: Callable[[], object], *turns: int
) -> list[int]:
    """Call the hook before some of the ranges, and return the list of ranges that were begun."""
    begun: list[int] = []
    read = snapshot_ranges.read_range

    def read_range(*arguments: Any) -> None:
        begun.append(len(begun) + 1)
        if len(begun) in turns:
            hook()
        read(*arguments)

    monkeypatch.setattr(snapshot_pool, "read_range", read_range)
    return begun


def is_exact(database: Database, zone: RawZone, outcome: object) -> bool:
    """Return whether the snapshot of a table without later changes has the rows of the source."""
    assert isinstance(outcome, SnapshotReport), outcome
    rows, source = copied_rows(zone, "t", outcome.snapshot_lsn), source_rows(database)
    assert len(rows) == outcome.row_count
    return len(rows) == len(source) and {row[0]: row for row in rows} == source
