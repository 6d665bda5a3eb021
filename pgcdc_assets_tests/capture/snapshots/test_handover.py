"""Snapshot and stream have no gap and no overlap (C1, C2, C4, C6, C12 to C14, B14)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table, snapshot_tables
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.reader import Pages, SnapshotReader
from pgcdc_assets.raw.delta.scan import data_files
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.handover import (
    copied_rows,
    replay,
    replay_changes,
    streamed_changes,
    without_plain_snapshots,
    writers,
)
from pgcdc_assets_tests.support.postgres.wire import peek
from pgcdc_assets_tests.support.snapshot_process import run_snapshot_process
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


def _slot(database: Database) -> str:
    return f"s_{database.name}"


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.slow
def test_snapshots_meet_the_stream_exactly_while_writers_continue(
    database: Database, zone: RawZone, seed: int
) -> None:
    """C1, C2: the first snapshot of the slot, and a later snapshot."""
    database.execute(
        "create table t (id int primary key, n int); create publication pub for table t"
    )
    database.execute("insert into t select i, 0 from generate_series(1, 10000) i")
    slot, settings = _slot(database), database.settings()
    reports: list[SnapshotReport] = []
    with writers(database, 4, seed):
        for _ in range(3):
            reports += snapshot_tables(settings, zone, slot, "pub", [TableName("public", "t")])
        last = streamed_changes(database, slot)[-1].commit_lsn
    assert len({report.snapshot_lsn for report in reports}) == 3
    epoch = zone.epochs.latest()
    assert epoch is not None
    assert epoch.start_lsn == reports[0].snapshot_lsn
    # Writers wrote before, during and after each snapshot.
    assert reports[0].snapshot_lsn < reports[-1].snapshot_lsn < last
    source = {str(row_id): [str(row_id), str(n)] for row_id, n in database.query("table t")}
    changes = streamed_changes(database, slot)
    for report in reports:
        rows = copied_rows(zone, "t", report.snapshot_lsn)
        assert len(rows) == report.row_count
        assert replay_changes(changes, rows, report.snapshot_lsn) == source


@pytest.mark.every_pg
def test_a_transaction_open_at_the_snapshot_is_captured_once(
    database: Database, zone: RawZone
) -> None:
    """C1: the transaction begins before the snapshot and commits later."""
    database.execute(
        "create table t (id int primary key, n int); create publication pub for table t"
    )
    slot, settings = _slot(database), database.settings()
    snapshot_tables(settings, zone, slot, "pub")
    with database.connect(autocommit=False) as late, late.cursor() as cursor:
        cursor.execute("insert into t values (2, 0)")
        database.execute("insert into t values (1, 0)")
        # The snapshot does not wait for the open transaction, which is therefore in the stream.
        [report] = snapshot_tables(settings, zone, slot, "pub", [TableName("public", "t")])
        late.commit()
    rows = copied_rows(zone, "t", report.snapshot_lsn)
    assert rows == [["1", "0"]]
    database.execute("delete from t where id = 1")
    assert replay(database, slot, rows, report.snapshot_lsn) == {"2": ["2", "0"]}


def _run(database: Database, zone: RawZone, failpoint: str, parallelism: int = 1) -> None:
    done = run_snapshot_process(database, zone, _slot(database), failpoint, parallelism=parallelism)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("failpoint", "complete"),
    [
        ("after_slot_creation", 0),
        ("after_epoch_commit", 0),
        ("mid_copy", 0),
        ("before_copy_commit:1", 0),
        ("after_copy_commit:2", 2),
        ("before_copy_commit:3", 2),
        ("after_copy_commit:3", 3),
    ],
)
def test_the_next_run_continues_a_killed_run(
    database: Database, zone: RawZone, failpoint: str, complete: int
) -> None:
    """C4: complete snapshots are kept, incomplete snapshots leave nothing, no change is lost."""
    _make_three_tables(database)
    _run(database, zone, failpoint)
    assert len(zone.snapshots.complete_snapshots()) == complete
    _complete_the_copies(database, zone, complete)


@pytest.mark.parametrize(
    "failpoint",
    [
        "mid_copy:7",
        pytest.param("before_copy_commit:2", marks=pytest.mark.soak),
        pytest.param("after_copy_commit:1", marks=pytest.mark.soak),
    ],
)
def test_the_next_run_continues_a_killed_run_of_four_connections(
    database: Database, zone: RawZone, failpoint: str
) -> None:
    """C4: the killed run has read ranges of all tables."""
    _make_three_tables(database)
    _run(database, zone, failpoint, parallelism=4)
    _complete_the_copies(database, zone, len(zone.snapshots.complete_snapshots()))


def _make_three_tables(database: Database) -> None:
    for n in range(3):
        database.execute(f"create table t{n} (id int primary key)")
        database.execute(f"insert into t{n} select generate_series(1, 1000)")
    database.execute("create publication pub for all tables")


def _complete_the_copies(database: Database, zone: RawZone, complete: int) -> None:
    slot, settings = _slot(database), database.settings()
    database.execute("insert into t0 values (0); insert into t2 values (0)")

    reports = snapshot_tables(settings, zone, slot, "pub")
    assert len(reports) == 3 - complete
    assert len(zone.epochs.all()) == 1
    epoch = zone.epochs.latest()
    assert epoch is not None
    copies = zone.snapshots.complete_snapshots()
    assert sorted(copy.table for copy in copies) == ["t0", "t1", "t2"]
    with query_connection(settings, "test") as conn:
        changes = peek(conn, slot, "pub").changes
    for copy in copies:
        assert copy.snapshot_lsn >= epoch.start_lsn
        rows = {row[0] for row in copied_rows(zone, copy.table, copy.snapshot_lsn)}
        later = {
            change.new[0]
            for change in changes
            if change.new
            and change.table == f"public.{copy.table}"
            and change.commit_lsn >= copy.snapshot_lsn
        }
        assert not rows & later
        expected = {str(n) for n in range(0 if copy.table in ("t0", "t2") else 1, 1001)}
        assert rows | later == expected
    assert database.query("select slot_name from pg_replication_slots where database = "
                          "current_database()") == [(slot,)]  # fmt: skip
    # A snapshot consists of the files of its commit.
    table = zone.snapshots.table.load()
    assert table is not None
    row_count = sum(file.row_count or 0 for file in data_files(table))
    assert row_count == sum(copy.row_count for copy in copies)


def test_an_empty_table_has_a_complete_snapshot(database: Database, zone: RawZone) -> None:
    """C6."""
    database.execute(
        "create table t (id int primary key, n numeric(5,2)); create publication pub for table t"
    )
    [report] = snapshot_tables(database.settings(), zone, _slot(database), "pub")
    assert report.row_count == 0
    [copy] = zone.snapshots.complete_snapshots(report.epoch)
    assert (copy.table, copy.row_count, copy.relation_version) == ("t", 0, 1)
    [version] = zone.relations.versions(report.epoch)
    assert [column.name for column in version.relation.columns] == ["id", "n"]
    assert snapshot_tables(database.settings(), zone, _slot(database), "pub") == []


@pytest.mark.every_pg
def test_an_unreadable_table_does_not_affect_other_tables(
    database: Database, zone: RawZone
) -> None:
    """B14, C12: a missing privilege, a missing table, a view, and a repeated name."""
    role = f"role_{database.name}"
    database.execute(f"create role {role} login replication")
    try:
        for n in range(3):
            database.execute(
                f"create table t{n} (id int primary key); grant select on t{n} to {role}"
            )
        database.execute(f"create publication pub for all tables; revoke select on t1 from {role}")
        database.execute("create view v as select 1")
        conninfo = database.conninfo.replace("user=postgres", f"user={role}")
        settings, slot = ConnectionSettings(conninfo, "test"), _slot(database)
        wanted = [TableName("public", name) for name in ("t0", "t1", "v", "nowhere", "t2", "t0")]
        outcomes = list(snapshot_each_table(settings, zone, slot, "pub", wanted))
        assert sorted(o.table for o in outcomes) == ["nowhere", "t0", "t1", "t2", "v"]
        reasons = {o.table: str(o.error) for o in outcomes if isinstance(o, SnapshotFailure)}
        assert sorted(reasons) == ["nowhere", "t1", "v"]
        assert f'grant select on "public"."t1" to "{role}"' in reasons["t1"]
        assert "public.v is a view" in reasons["v"]
        assert "public.nowhere does not exist" in reasons["nowhere"]
        with pytest.raises(ConfigurationError, match=r"public\.t1 "):
            snapshot_tables(settings, zone, slot, "pub", wanted)
    finally:
        database.execute(f"drop owned by {role}; drop role {role}")


def test_a_table_altered_during_its_snapshot_is_read_with_its_new_columns(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C13: the first attempt detects the change, and the second attempt uses a new snapshot."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    database.execute("insert into t values (1)")
    original, attempts = SnapshotReader.read, []

    def altered(
        reader: SnapshotReader, table: PublishedTable, pages: Pages | None = None
    ) -> Iterator[pa.RecordBatch]:
        attempts.append(table)
        if len(attempts) == 1:
            database.execute("alter table t add column n int not null default 7")
        return original(reader, table, pages)

    monkeypatch.setattr(SnapshotReader, "read", altered)
    [report] = snapshot_tables(database.settings(), zone, _slot(database), "pub")
    assert len(attempts) == 2
    assert copied_rows(zone, "t", report.snapshot_lsn) == [["1", "7"]]
    epoch = zone.epochs.latest()
    assert epoch is not None
    assert report.snapshot_lsn > epoch.start_lsn


def test_a_column_added_during_the_slots_creation_is_in_the_snapshot(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C13: the slot's creation waits for an open transaction, and the snapshot has the column."""
    without_plain_snapshots(monkeypatch)
    database.execute("create table t (id int primary key); create publication pub for table t")
    database.execute("insert into t values (1)")
    slot, settings = _slot(database), database.settings()
    snapshot_tables(settings, zone, slot, "pub")
    reports: list[SnapshotReport] = []

    def copy() -> None:
        reports.extend(snapshot_tables(settings, zone, slot, "pub", [TableName("public", "t")]))

    with database.connect(autocommit=False) as late, late.cursor() as cursor:
        cursor.execute("select pg_current_xact_id()")
        copying = threading.Thread(target=copy)
        copying.start()
        wait_until(
            lambda: database.value(
                "select count(*) from pg_locks where locktype = 'transactionid' and not granted"
            ),
            "the slot to wait for the open transaction",
        )
        database.transaction("alter table t add column n int", "update t set n = 7")
        late.commit()
        copying.join()

    assert copied_rows(zone, "t", reports[0].snapshot_lsn) == [["1", "7"]]
