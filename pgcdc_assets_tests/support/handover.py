"""Concurrent writers during a snapshot, and the comparison of snapshot and later changes."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg2
import pytest

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.postgres.wire import UNCHANGED, peek

# Statements on a table `t` with the key `id` and a column `n`.
STATEMENTS = (
    "insert into t values (%s, 1) on conflict do nothing",
    "update t set n = n + 1 where id = %s",
    "update t set id = -id where id = %s and not exists (select from t x where x.id = -t.id)",
    "delete from t where id = %s",
)


@contextmanager
def writers(
    database: Database,
    count: int,
    seed: int,
    statements: Sequence[str] = STATEMENTS,
    key_count: int = 20_000,
) -> Iterator[None]:
    """Run connections that write and roll back, until the end of the block.

    Args:
        statements: statements with a placeholder for a key.
        key_count: the keys are from 1 to this number.
    """
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(number: int) -> None:
        choose = random.Random(f"{seed} {number}")
        try:
            with database.connect(autocommit=False) as conn, conn.cursor() as cursor:
                while not stop.is_set():
                    for _ in range(choose.randint(1, 8)):
                        row_id = choose.randint(1, key_count)
                        cursor.execute(choose.choice(statements), (row_id,))
                    # Without a pause the stream becomes long, and the test decodes it in Python.
                    stop.wait(0.005)
                    try:
                        conn.rollback() if choose.random() < 0.1 else conn.commit()
                    except psycopg2.errors.UniqueViolation:
                        conn.rollback()
        except (psycopg2.errors.UniqueViolation, psycopg2.errors.DeadlockDetected):
            return write(number + 1000)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


def without_plain_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export every snapshot by a slot, as on a server with constant writes to its tables."""
    monkeypatch.setattr(
        "pgcdc_assets.capture.snapshots.export.export_plain_snapshot",
        lambda settings, table_ids: contextlib.nullcontext(),
    )


def copied_rows(zone: RawZone, table: str, snapshot_lsn: Lsn) -> list[list[str | None]]:
    """Return the rows of a snapshot from the lake."""
    copies = zone.snapshots.table.load()
    assert copies is not None
    rows = copies.to_pyarrow_table(
        filters=[("table", "=", table), ("snapshot_lsn", "=", int(snapshot_lsn))],
        columns=["new"],
    )
    texts: list[list[str | None]] = rows.column("new").to_pylist()
    return texts


def streamed_changes(database: Database, slot: str) -> list[Any]:
    """Return all changes that a slot has for the publication `pub`."""
    with query_connection(database.settings(), "test", statement_timeout_ms=0) as conn:
        return list(peek(conn, slot, "pub").changes)


def replay(
    database: Database, slot: str, rows: list[list[str | None]], snapshot_lsn: Lsn
) -> dict[str | None, list[str | None]]:
    """Fold the stream into a snapshot of table `t`. See `replay_changes`."""
    return replay_changes(streamed_changes(database, slot), rows, snapshot_lsn)


def replay_changes(
    changes: Sequence[Any], rows: list[list[str | None]], snapshot_lsn: Lsn
) -> dict[str | None, list[str | None]]:
    """Fold changes into a snapshot of table `t`. Each change must find its row.

    If the snapshot has an additional row, a missing row or a row of another time, this function
    fails, or its result differs from the source.
    """
    state = {row[0]: row for row in rows}
    assert len(state) == len(rows)
    applied = 0
    for change in changes:
        if change.commit_lsn < snapshot_lsn or change.table != "public.t":
            continue
        applied += 1
        old: list[str | None] | None = None
        if change.op == "I":
            assert change.new is not None
            assert change.new[0] not in state
        if change.op in "UD":
            key = change.key[0] if change.key else change.new[0]
            old = state.pop(key)
        if change.new is not None:
            new = change.new
            if UNCHANGED in new:
                assert old is not None
                new = [o if text == UNCHANGED else text for o, text in zip(old, new, strict=True)]
            state[new[0]] = new
    assert applied
    return state
