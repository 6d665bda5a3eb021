"""Random copies of a standby whose replay ends snapshots and sessions all the time (C1, C3)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure
from pgcdc_assets.capture.snapshots.run import snapshot_each_table
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.handover import copied_rows, replay, writers
from pgcdc_assets_tests.support.postgres.wire import peek
from pgcdc_assets_tests.support.resumed_copies import STATEMENTS, TABLE, T, slot_of, source_rows
from pgcdc_assets_tests.support.standby import Source, recovery_conflicts

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.soak, pytest.mark.every_pg]

BAG = TableName("public", "bag")
BAG_STATEMENTS = (
    "insert into bag values (%s %% 9, 1, repeat('b', 700))",
    "update bag set n = n + 1 where ctid = (select ctid from bag where id = %s %% 9 limit 1)",
    "delete from bag where ctid = (select ctid from bag where id = %s %% 9 limit 1)",
)


def _replayed_bag(database: Database, rows: list[list[str | None]], lsn: Lsn) -> Counter[object]:
    """Fold the stream into a snapshot of the table without a key. Each change finds its row."""
    state = Counter[object](tuple(row) for row in rows)
    with query_connection(database.settings(), "test", statement_timeout_ms=0) as conn:
        changes = peek(conn, slot_of(database), "pub").changes
    for change in changes:
        if change.commit_lsn < lsn or change.table != str(BAG):
            continue
        if change.op in "UD":
            assert change.key is not None
            assert state[tuple(change.key)]
            state[tuple(change.key)] -= 1
        if change.new is not None:
            state[tuple(change.new)] += 1
    return +state


def test_copies_between_conflicts_are_exact(
    source: Source, zone: RawZone, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy is exact, or fails with an error that another run may follow."""
    primary, choose = source.primary, random.Random(seed)
    primary.execute(TABLE.format(rows=400))
    primary.execute(
        "create table bag (id int, n int, pad text); alter table bag replica identity full; "
        "alter table bag alter pad set storage plain; alter publication pub add table bag; "
        "insert into bag select i % 9, 0, repeat('b', 700) from generate_series(1, 200) i"
    )
    done: list[tuple[TableName, Lsn]] = []
    failures: list[SnapshotFailure] = []

    def copy() -> None:
        policy = SnapshotPolicy(choose.randint(1, 3), 8192 * choose.choice((1, 4, 16)))
        try:
            for outcome in snapshot_each_table(
                primary.settings(),
                zone,
                slot_of(primary),
                "pub",
                [T, BAG],
                policy=policy,
                standby=source.standby.settings(),
            ):
                if isinstance(outcome, SnapshotFailure):
                    assert isinstance(outcome.error, TransientError), outcome.error
                    failures.append(outcome)
                else:
                    done.append((outcome.name, outcome.snapshot_lsn))
        except TransientError as error:
            failures.append(SnapshotFailure("", "", error))

    statements = STATEMENTS + BAG_STATEMENTS
    with (
        writers(primary, 2, seed, statements, key_count=450),
        recovery_conflicts(primary, "t", "bag"),
    ):
        # At once, soon, and never: the last copies complete on a slow machine as well.
        for delay in ("0", "100ms", "-1"):
            with source.standby_setting("max_standby_streaming_delay", delay):
                copy()
    for name, lsn in done:
        rows = copied_rows(zone, name.table, lsn)
        if name == T:
            assert replay(primary, slot_of(primary), rows, lsn) == source_rows(primary), lsn
        else:
            found = primary.query("select id::text, n::text, pad from bag")
            assert _replayed_bag(primary, rows, lsn) == Counter[object](found), lsn
    assert {name for name, _ in done} == {T, BAG}
    assert "was ended by a conflict" in caplog.text or failures
