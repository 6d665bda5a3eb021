"""A later snapshot without a slot does not wait for old writers, and is exact (C1, C2, C12)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.copy.reader import begin_at
from pgcdc_assets.postgres.slots.creation import create_slot
from pgcdc_assets.postgres.snapshots import plain as plain_snapshot
from pgcdc_assets.postgres.snapshots.plain import export_plain_snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database, create_database
from pgcdc_assets_tests.support.handover import (
    copied_rows,
    replay,
    replay_changes,
    streamed_changes,
    without_plain_snapshots,
    writers,
)
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

_T = TableName("public", "t")


def _slot(database: Database) -> str:
    return f"s_{database.name}"


def _make(database: Database, zone: RawZone) -> None:
    """Create tables t and other, and the slot with a first snapshot."""
    database.execute(
        "create table t (id int primary key, n int); create table other (id int primary key); "
        "create publication pub for table t, other"
    )
    snapshot_tables(database.settings(), zone, _slot(database), "pub")


def _oid(database: Database, table: str = "t") -> int:
    return int(database.value(f"select '{table}'::regclass::oid::bigint"))


def _rows(database: Database) -> dict[str | None, list[str | None]]:
    return {row[0]: list(row) for row in database.query("select id::text, n::text from t")}


def _no_slot(*_: Any, **__: Any) -> Any:
    raise AssertionError("a slot was created")


def _export(database: Database) -> tuple[list[list[str | None]], Lsn] | None:
    """Return the rows of a plain snapshot of t and its LSN; None without a proof."""
    settings = database.settings()
    with (
        export_plain_snapshot(settings, [_oid(database)]) as snapshot,
        query_connection(settings, "test") as conn,
        conn.cursor() as cursor,
    ):
        if snapshot is None:
            return None
        begin_at(conn, snapshot.snapshot_name)
        cursor.execute("select id::text, n::text from public.t")
        return [list(row) for row in cursor.fetchall()], snapshot.consistent_point


@pytest.mark.every_pg
def test_a_later_snapshot_waits_for_no_writer_and_creates_no_slot(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1, C12: the writers commit after the snapshots, and the stream has their rows."""
    _make(database, zone)
    monkeypatch.setattr("pgcdc_assets.capture.snapshots.export.create_slot", _no_slot)
    reports = []
    with (
        database.connect(autocommit=False) as old,
        database.connect(autocommit=False) as aborted,
        old.cursor() as cursor,
        aborted.cursor() as failing,
    ):
        cursor.execute("insert into t values (2, 0); insert into other values (2)")
        cursor.execute("savepoint a; insert into t values (3, 0)")
        failing.execute("insert into t values (9, 0)")
        database.execute("insert into t values (1, 0)")
        for _ in range(2):
            reports += snapshot_tables(database.settings(), zone, _slot(database), "pub", [_T])
        cursor.execute("update t set n = 1 where id in (1, 2)")
        old.commit()
        aborted.rollback()
    first, second = (report.snapshot_lsn for report in reports)
    # Each snapshot has its own LSN, even without a change in between.
    assert first < second
    for lsn in (first, second):
        rows = copied_rows(zone, "t", lsn)
        assert rows == [["1", "0"]]
        assert replay(database, _slot(database), rows, lsn) == _rows(database)


@pytest.mark.slow
def test_plain_snapshots_are_exact_while_writers_commit(
    database: Database, zone: RawZone, seed: int
) -> None:
    """C2: each proved LSN separates the transactions of its table."""
    _make(database, zone)
    made = []
    with writers(database, 3, seed, key_count=200):
        for _ in range(12):
            made.append(_export(database))
            time.sleep(0.01)
    found = [each for each in made if each is not None]
    assert found
    changes = streamed_changes(database, _slot(database))
    source = _rows(database)
    for rows, lsn in found:
        assert replay_changes(changes, rows, lsn) == source


@pytest.mark.sampled
def test_a_transaction_whose_commit_is_not_visible_yet_prevents_the_proof(
    own_server: EmbeddedServer, zone: RawZone
) -> None:
    """C1: its commit record is below each LSN that is read, but its row is in no snapshot."""
    own_server.start()
    database = create_database(own_server)
    _make(database, zone)
    database.execute("insert into t values (1, 0)")
    slot, settings = _slot(database), database.settings(lock_timeout_ms=300)

    def insert() -> None:
        database.execute("set synchronous_commit = on; insert into t values (2, 0)")

    def waits() -> bool:
        return bool(
            database.value("select count(*) from pg_stat_activity where wait_event = 'SyncRep'")
        )

    writer = threading.Thread(target=insert)
    # After writing its record, the commit waits for a standby that does not exist.
    database.execute("alter system set synchronous_standby_names = 'none'")
    database.value("select pg_reload_conf()")
    writer.start()
    try:
        wait_until(waits, "the commit to wait for the standby")
        assert _rows(database) == {"1": ["1", "0"]}
        assert _export(database) is None
        # Other tables get their snapshots.
        with export_plain_snapshot(settings, [_oid(database, "other")]) as other:
            assert other is not None
        # The slot's creation waits up to a limit, and the error names the process.
        with pytest.raises(TransientError, match=r"open transaction \d+ of process \d+"):
            snapshot_tables(settings, zone, slot, "pub", [_T])
    finally:
        database.execute("alter system reset synchronous_standby_names")
        database.value("select pg_reload_conf()")
        writer.join()
    exported = _export(database)
    assert exported is not None
    assert sorted(exported[0]) == [["1", "0"], ["2", "0"]]


@pytest.mark.sampled
def test_active_and_prepared_transactions_prevent_the_proof(
    own_server: EmbeddedServer, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: a plain snapshot cannot distinguish them from committing transactions."""
    database = create_database(own_server.start())
    database.execute("alter system set max_prepared_transactions = 2")
    own_server.stop()
    own_server.start()
    _make(database, zone)
    monkeypatch.setattr(plain_snapshot, "_ATTEMPT_SECONDS", 0.2)
    database.execute("begin; insert into t values (1, 0); prepare transaction 'p'")
    assert _export(database) is None
    database.execute("commit prepared 'p'")
    assert _export(database) is not None

    def work() -> None:
        database.execute(
            "with i as (insert into t values (2, 0) returning 1) select pg_sleep(60) from i"
        )

    worker = threading.Thread(target=lambda: _ignore_cancel(work))
    worker.start()
    try:
        sleeping = "select pid from pg_stat_activity where wait_event = 'PgSleep'"
        wait_until(lambda: database.query(sleeping), "the statement")
        assert _export(database) is None
        with database.connect(autocommit=False) as blocked, blocked.cursor() as cursor:
            cursor.execute("insert into other values (1)")
            with export_plain_snapshot(database.settings(), [_oid(database, "other")]) as other:
                assert other is not None
    finally:
        database.query(f"select pg_cancel_backend(pid) from ({sleeping}) s")
        worker.join()


def _ignore_cancel(work: Any) -> None:
    from psycopg2.errors import QueryCanceled

    try:
        work()
    except QueryCanceled:
        pass


def test_without_a_proof_a_slot_exports_the_snapshot_within_the_lock_timeout(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: the slot's creation waits for the old writer, and the error names its process."""
    _make(database, zone)
    without_plain_snapshots(monkeypatch)
    policy = SnapshotPolicy(lock_timeout_seconds=0.3)
    with database.connect(autocommit=False) as old, old.cursor() as cursor:
        cursor.execute("insert into t values (2, 0)")
        with pytest.raises(TransientError) as caught:
            snapshot_tables(database.settings(), zone, _slot(database), "pub", [_T], policy=policy)
        assert f"of process {old.get_backend_pid()}" in str(caught.value)
        assert f"pg_terminate_backend({old.get_backend_pid()})" in str(caught.value)
        old.commit()
    [report] = snapshot_tables(database.settings(), zone, _slot(database), "pub", [_T])
    assert copied_rows(zone, "t", report.snapshot_lsn) == [["2", "0"]]


def test_a_table_that_was_created_again_after_the_proof_gets_a_snapshot_by_a_slot(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C13: the LSN is exact only for the table of the proof."""
    _make(database, zone)
    slots: list[str] = []

    def counted(settings: Any, slot: str, **options: Any) -> Any:
        slots.append(slot)
        return create_slot(settings, slot, **options)

    def export(settings: Any, table_ids: Any) -> Any:
        exported = export_plain_snapshot(settings, table_ids)
        database.execute("drop table t; create table t (id int primary key, n int)")
        database.execute("alter publication pub add table t; insert into t values (5, 5)")
        return exported

    monkeypatch.setattr("pgcdc_assets.capture.snapshots.export.create_slot", counted)
    monkeypatch.setattr("pgcdc_assets.capture.snapshots.export.export_plain_snapshot", export)
    [report] = snapshot_tables(database.settings(), zone, _slot(database), "pub", [_T])
    assert len(slots) == 1
    assert copied_rows(zone, "t", report.snapshot_lsn) == [["5", "5"]]
