"""Failures while tables are read in parallel, and the state after a failure."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace
from pathlib import Path

import psycopg2.errors
import pyarrow as pa
import pytest

from pgcdc_assets.activity import Activity, watched_by
from pgcdc_assets.capture.snapshots import pool as snapshot_pool
from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotPool, SnapshotReport
from pgcdc_assets.errors import ConnectionLost, DefiniteError, TransientError
from pgcdc_assets.postgres.catalog.relations import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.reader import SnapshotReader
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets.raw import snapshots
from pgcdc_assets.raw.delta.files import FileWriter
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.snapshot_copies import (
    PAGE_BYTES,
    await_no_sessions,
    copy_all,
    copy_published,
    is_everything_copied,
    snapshot_files,
    snapshot_rows,
)

pytestmark = pytest.mark.postgres


@pytest.mark.sampled
def test_a_failed_range_does_not_affect_complete_ranges(database: Database, zone: RawZone) -> None:
    """C5: the server reports an error in the middle of the rows. The other table is complete."""
    database.execute(
        """
        create table bad (id int primary key, note text);
        create table good (id int primary key, note text);
        insert into bad select i, repeat('x', 700) from generate_series(1, 1000) i;
        insert into good select i, repeat('x', 700) from generate_series(1, 1000) i;
        create publication pub for table bad where (1000 / (id - 700) < 5000), good
        """
    )
    outcomes = {outcome.table: outcome for outcome in copy_all(database, zone)}
    assert isinstance(outcomes["good"], SnapshotReport)
    failure = outcomes["bad"]
    assert isinstance(failure, SnapshotFailure)
    assert isinstance(failure.error, DefiniteError)
    assert "public.bad cannot be read: Postgres reports an error (SQLSTATE 22012)" in str(
        failure.error
    )
    assert [copy.table for copy in zone.snapshots.complete_snapshots()] == ["good"]
    named = {file.path for file in snapshot_files(zone)}
    # The complete ranges are kept for the next run, and files of the failed range are deleted.
    in_ranges = {file.path for landed in zone.ranges.all() for file in landed.files}
    assert in_ranges
    named |= in_ranges
    assert {path.name for path in Path(zone.snapshots.table.uri).glob("*.parquet")} == named
    await_no_sessions(database)


_SLEEPY = """
create table fast (id int primary key, note text);
create table slow (id int primary key, note text);
insert into fast values (1, 'x');
insert into slow select i, repeat('x', 700) from generate_series(1, 400) i;
create function sleepy(int) returns boolean language sql
  as 'select pg_catalog.pg_sleep(0.5) is not null';
create publication pub for table fast, slow
"""


def _fast_and_sleepy(database: Database) -> tuple[PublishedTable, PublishedTable]:
    """Create two tables. To read a row of the second table takes half a second."""
    database.execute(_SLEEPY)
    with query_connection(database.settings(), "test") as conn:
        fast, slow = published_tables(conn, "pub")
    return fast, PublishedTable(slow.relation, row_filter="public.sleepy(id)")


def test_a_terminated_session_is_replaced_for_the_next_table(
    database: Database,
) -> None:
    """B2."""
    fast, sleepy = _fast_and_sleepy(database)
    settings = database.settings()
    ended = threading.Timer(
        1.0,
        database.execute,
        [
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = 'pgcdc copy test'"
        ],
    )
    with (
        create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot,
        SnapshotReader(settings, snapshot.snapshot_name) as reader,
    ):
        ended.start()
        with pytest.raises(ConnectionLost, match=r"reading public\.slow"):
            list(reader.read(sleepy))
        ended.join()
        rows = [row for batch in reader.read(fast) for row in batch.column("new").to_pylist()]
        assert rows == [["1", "x"]]


def test_the_statement_of_a_range_ends_at_its_limit(database: Database, zone: RawZone) -> None:
    """C15: `snapshot.statement_timeout_seconds` bounds one range, and other tables are complete."""
    fast, sleepy = _fast_and_sleepy(database)
    settings = database.settings()
    policy = SnapshotPolicy(2, PAGE_BYTES, statement_timeout_seconds=0.3)
    with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
        outcomes = list(SnapshotPool(settings, zone, 1, snapshot, policy).copy([fast, sleepy]))
    (failure,) = (each for each in outcomes if isinstance(each, SnapshotFailure))
    assert isinstance(failure.error, TransientError)
    assert "reading public.slow" in str(failure.error)
    assert "statement timeout" in str(failure.error)
    assert [copy.table for copy in zone.snapshots.complete_snapshots()] == ["fast"]


def test_abandoned_snapshots_end_at_once_and_leave_nothing(
    database: Database, zone: RawZone
) -> None:
    fast, sleepy = _fast_and_sleepy(database)
    endless = PublishedTable(sleepy.relation, row_filter="pg_sleep(60)::text is null")
    settings = database.settings()
    with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
        pool = SnapshotPool(settings, zone, 1, snapshot, SnapshotPolicy(2, PAGE_BYTES))
        outcomes = pool.copy([fast, endless])
        first = next(outcomes)
        assert isinstance(first, SnapshotReport)
        assert first.table == "fast"
        began = time.monotonic()
        outcomes.close()
    assert time.monotonic() - began < 8
    assert [copy.table for copy in zone.snapshots.complete_snapshots()] == ["fast"]
    assert not [t for t in threading.enumerate() if t.name.startswith("pgcdc")]
    await_no_sessions(database)


def test_a_commit_that_fails_after_its_log_entry_keeps_the_files(
    database: Database, zone: RawZone
) -> None:
    """C5: the checkpoint after the log entry cannot be written, as on a full disk."""
    database.execute(
        "create table t (id int primary key, note text); create publication pub for table t;"
        "insert into t values (1, 'a')"
    )
    table = zone.snapshots.table
    interval = 50
    while (loaded := table.load_or_create()).version() < interval - 2:
        loaded.alter.set_table_properties({"delta.enableExpiredLogCleanup": "false"})
    log = Path(table.uri) / "_delta_log"
    (log / f"{interval - 1:020d}.checkpoint.parquet" / "in_the_way").mkdir(parents=True)
    [outcome] = copy_all(database, zone)
    assert isinstance(outcome, SnapshotFailure)
    assert "Nothing was committed" not in str(outcome.error)
    assert "whether the commit is in the log" in str(outcome.error)
    assert [copy.table for copy in zone.snapshots.complete_snapshots()] == ["t"]
    assert snapshot_rows(zone, "t") == [["1", "a"]]


def test_a_connection_is_not_reused_after_an_error_of_the_lake(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: the lake fails while the server still sends rows of the table."""
    database.execute(
        """
        create table bad (id int primary key, note text);
        alter table bad alter note set storage external;
        create table good (id int primary key, note text);
        insert into bad select i, repeat('x', 10000) from generate_series(1, 3000) i;
        insert into good values (1, 'a');
        create publication pub for table bad, good
        """
    )
    monkeypatch.setattr(
        snapshot_pool, "SnapshotReader", functools.partial(SnapshotReader, chunk_bytes=10_000)
    )
    monkeypatch.setattr(snapshots, "ROW_GROUP_BYTES", 1)
    original = FileWriter.write
    writes: list[pa.Table] = []

    def write(writer: FileWriter, rows: pa.Table) -> None:
        if "new" in rows.column_names:
            writes.append(rows)
        if len(writes) == 1:
            raise TransientError(reason="The lake is full.")
        original(writer, rows)

    monkeypatch.setattr(FileWriter, "write", write)
    bad, good = copy_all(database, zone, parallelism=1, range_bytes=1 << 30)
    assert isinstance(bad, SnapshotFailure)
    assert str(bad.error) == "The lake is full."
    assert isinstance(good, SnapshotReport)
    assert snapshot_rows(zone, "good") == [["1", "a"]]
    assert not [t for t in threading.enumerate() if t.name.startswith("pgcdc")]
    await_no_sessions(database)


def test_attempts_to_read_a_snapshot_that_has_ended_leave_no_session(database: Database) -> None:
    """B2: the exporting session ended while tables remained."""
    fast, _ = _fast_and_sleepy(database)
    settings = database.settings()
    with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
        pass
    with SnapshotReader(settings, snapshot.snapshot_name) as reader:
        for _ in range(3):
            with pytest.raises(TransientError, match="does not exist any more"):
                list(reader.read(fast))
        await_no_sessions(database)


def test_ranges_do_not_nest_subtransactions(database: Database) -> None:
    """A subtransaction for each range would use memory of the server."""
    fast, _ = _fast_and_sleepy(database)
    settings = database.settings()
    with (
        create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot,
        SnapshotReader(settings, snapshot.snapshot_name) as reader,
    ):
        list(reader.read(fast))
        conn, _ = reader._connections()
        with conn.cursor() as cursor, pytest.raises(psycopg2.errors.InvalidSavepointSpecification):
            cursor.execute("release savepoint before_table")


_COPY = "pgcdc copy test"


@pytest.mark.timeout(40)
@pytest.mark.parametrize("statement", ["begin isolation level", "set transaction snapshot"])
def test_connections_that_are_cut_while_they_open_fail_the_snapshot(
    database: Database, zone: RawZone, proxy: TcpProxy, statement: str
) -> None:
    """B2: no connection is left, so the snapshot fails, and does not wait."""
    _fast_and_sleepy(database)
    proxy.cut_at(_COPY, statement, times=2)
    settings = ConnectionSettings(proxy.conninfo(database.conninfo), "test")
    with pytest.raises(ConnectionLost, match="opening a connection for a copy"):
        list(copy_published(database, settings, zone, SnapshotPolicy(2, 4 * PAGE_BYTES)))
    assert proxy.cuts_left == 0
    assert zone.snapshots.complete_snapshots() == []
    assert not [t for t in threading.enumerate() if t.name.startswith("pgcdc")]
    await_no_sessions(database)


@pytest.mark.timeout(40)
def test_a_connection_that_is_cut_while_it_opens_leaves_its_work_to_the_others(
    database: Database, zone: RawZone, proxy: TcpProxy
) -> None:
    """B2."""
    database.execute(
        "create table t (id int primary key, note text); create publication pub for table t;"
        "insert into t select i, repeat('x', 700) from generate_series(1, 400) i"
    )
    proxy.cut_at(_COPY, "begin isolation level", times=1)
    settings = ConnectionSettings(proxy.conninfo(database.conninfo), "test")
    [outcome] = copy_published(database, settings, zone, SnapshotPolicy(2, 4 * PAGE_BYTES))
    assert proxy.cuts_left == 0
    assert isinstance(outcome, SnapshotReport)
    assert is_everything_copied(database, zone, "t")


class _UnreadableReader(SnapshotReader):
    """Reader whose connections fail by an error that no layer below converts."""

    def open(self) -> None:
        raise MemoryError


@pytest.mark.timeout(40)
def test_any_error_of_a_connection_reaches_the_caller(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("create table t (id int primary key); create publication pub for table t")
    monkeypatch.setattr(snapshot_pool, "SnapshotReader", _UnreadableReader)
    with pytest.raises(MemoryError):
        list(copy_all(database, zone, parallelism=2))
    assert not [t for t in threading.enumerate() if t.name.startswith("pgcdc")]


class _Ends:
    """Watcher that records the end of activities."""

    def __init__(self) -> None:
        self.is_done: dict[str, bool] = {}

    def began(self, activity: Activity) -> None:
        """Ignore the start."""

    def ended(self, activity: Activity) -> None:
        """Record whether the activity was successful."""
        self.is_done[activity.name] = activity.is_done

    def noticed(self, text: str) -> None:
        """Ignore a notice."""


def test_the_activity_of_a_failed_snapshot_ends_without_success(
    database: Database, zone: RawZone
) -> None:
    database.execute(
        "create table bad (id int primary key); create table good (id int primary key);"
        "insert into bad values (0); insert into good values (0);"
        "create publication pub for table bad where (1 / id > 0), good"
    )
    ends = _Ends()
    with watched_by(ends):
        list(copy_all(database, zone))
    assert ends.is_done == {"snapshot of public.bad": False, "snapshot of public.good": True}


@pytest.mark.parametrize(("limit", "is_enough"), [(5, True), (1, False)])
def test_the_available_connections_of_a_role_read_all_tables(
    database: Database, zone: RawZone, limit: int, is_enough: bool
) -> None:
    """A reader without a connection takes no table, and the other readers read all tables."""
    role = f"role_{database.name}"
    database.execute(f"create role {role} login connection limit {limit}")
    try:
        for number in range(6):
            database.execute(f"create table t{number} (id int primary key, note text)")
            database.execute(f"insert into t{number} values ({number}, 'x')")
            database.execute(f"grant select on t{number} to {role}")
        database.execute("create publication pub for all tables")
        settings = database.settings()
        limited = replace(
            settings, conninfo=database.conninfo.replace("user=postgres", f"user={role}")
        )
        with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
            with query_connection(settings, "test") as conn:
                tables = published_tables(conn, "pub")
            pool = SnapshotPool(limited, zone, 1, snapshot, SnapshotPolicy(4))
            if is_enough:
                outcomes = list(pool.copy(tables))
                assert all(isinstance(outcome, SnapshotReport) for outcome in outcomes)
                assert len(outcomes) == 6
            else:
                with pytest.raises(ConnectionLost):
                    list(pool.copy(tables))
                assert zone.snapshots.complete_snapshots() == []
    finally:
        database.execute(f"drop owned by {role}; drop role {role}")
