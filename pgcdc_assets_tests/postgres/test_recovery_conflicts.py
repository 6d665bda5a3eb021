"""Deadlocks, dropped databases and heartbeats, at a standby and at a primary (C3)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg2
import pytest

from pgcdc_assets.errors import ConfigurationError, ConnectionLost, SnapshotEnded, TransientError
from pgcdc_assets.postgres.catalog.relations import published_tables
from pgcdc_assets.postgres.connection import connect, query_connection
from pgcdc_assets.postgres.copy.errors import reading_failure
from pgcdc_assets.postgres.copy.reader import SnapshotReader
from pgcdc_assets.postgres.copy.transport import copy_chunks
from pgcdc_assets.postgres.errors import reported_failure
from pgcdc_assets.postgres.snapshots.standby import export_standby_snapshot
from pgcdc_assets.postgres.stream.errors import stream_failure
from pgcdc_assets.postgres.stream.transport import ServerError
from pgcdc_assets.postgres.wal.positions import emit_heartbeat
from pgcdc_assets_tests.support.database import Database, create_database, drop_database
from pgcdc_assets_tests.support.standby import Source
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

_PARTITIONED = """
create table t (id int, n int) partition by list (n);
create table t_1 partition of t for values in (1);
create table t_2 partition of t for values in (2);
insert into t select i, 1 + i % 2 from generate_series(1, 50) i;
create publication pub for table t with (publish_via_partition_root)
"""
# The standby waits for the copy, and does not end it because of the time.
_PATIENT = "max_standby_streaming_delay", "-1"

_COUNTED_DEADLOCKS = """
select deadlocks::int + confl_deadlock::int
  from pg_stat_database join pg_stat_database_conflicts using (datid, datname)
 where datname = current_database()
"""


@contextlib.contextmanager
def _reader(source: Source) -> Iterator[tuple[SnapshotReader, Any]]:
    """Yield an open reader of a snapshot of the standby, and the published table."""
    primary, standby = source.primary.settings(), source.standby.settings()
    with export_standby_snapshot(primary, standby) as snapshot:
        with query_connection(primary, "test") as conn:
            [table] = published_tables(conn, "pub")
        with SnapshotReader(standby, snapshot.snapshot_name, primary=primary) as reader:
            reader.open()
            yield reader, table


def _waits(database: Database, application: str) -> bool:
    statement = (
        "select count(*) from pg_stat_activity where application_name = %s "
        "and wait_event_type = 'Lock'"
    )
    return bool(database.value(statement, (application,)))


@pytest.mark.sampled
@pytest.mark.every_pg
def test_a_copy_that_is_in_a_deadlock_with_the_replay_is_in_conflict(source: Source) -> None:
    """C3, SQLSTATE 40P01: the copy waits for a lock of the replay, and the replay for the copy's.

    A transaction of the primary locks a partition, and later the partitioned table.
    """
    source.primary.execute(_PARTITIONED)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            list(reader.read(table))
        except BaseException as failure:
            failures.append(failure)

    with source.standby_setting(*_PATIENT), _reader(source) as (reader, table):
        with source.primary.connect(autocommit=False) as locking, locking.cursor() as cursor:
            # A transaction with an ID: only its locks are in the WAL.
            cursor.execute("select pg_current_xact_id()")
            cursor.execute("lock table t_2 in access exclusive mode")
            source.wait_for_replay()
            thread = threading.Thread(target=read)
            thread.start()
            wait_until(lambda: _waits(source.standby, "pgcdc copy test"), "the copy to wait")
            cursor.execute("lock table only t in access exclusive mode")
            # The WAL of the lock is written before long.
            source.primary.value("select pg_switch_wal()::text")
            thread.join(60)
            assert not thread.is_alive()
            locking.rollback()
    [failure] = failures
    assert isinstance(failure, SnapshotEnded), failure
    # The error has no cause, which may quote a row: the standby counts the deadlock.
    wait_until(lambda: source.standby.value(_COUNTED_DEADLOCKS) == 1, "the counted deadlock")
    assert "set hot_standby_feedback = on" in str(failure)


def test_two_sessions_of_the_primary_in_a_deadlock_may_run_again(database: Database) -> None:
    """SQLSTATE 40P01 of a server that replays nothing."""
    database.execute("create table one (); create table two ()")
    settings = database.settings()
    lock = "lock table public.{} in access exclusive mode"
    failures: list[BaseException] = []
    first_locks = threading.Barrier(2, timeout=30)

    def run(first: str, second: str) -> None:
        try:
            with query_connection(settings, "test") as conn, conn.cursor() as cursor:
                cursor.execute("begin; set local lock_timeout = 0; " + lock.format(first))
                first_locks.wait()
                cursor.execute(lock.format(second))
        except BaseException as failure:
            failures.append(failure)

    threads = [
        threading.Thread(target=run, args=names) for names in (("one", "two"), ("two", "one"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [failure] = failures
    assert isinstance(failure, TransientError)
    assert not isinstance(failure, ConnectionLost)
    assert isinstance(failure.__cause__, psycopg2.Error)
    assert failure.__cause__.pgcode == "40P01"
    assert "deadlock detected" in str(failure)


@pytest.mark.sampled
@pytest.mark.every_pg
def test_a_dropped_database_ends_the_sessions_of_its_standby(source: Source) -> None:
    """C3, SQLSTATE 57P04: sessions of the standby do not prevent the drop at the primary."""
    dropped = create_database(source.primary.server)
    dropped.execute("create table t (id int primary key); create publication pub for table t")
    source.wait_for_replay()
    settings = Database(source.standby.server, dropped.name).settings()
    failures: list[BaseException] = []

    def copy() -> None:
        with contextlib.closing(connect(settings, "copy")) as conn:
            list(copy_chunks(settings, conn, "copy (select pg_sleep(300)) to stdout"))

    def query() -> None:
        with query_connection(settings, "query", statement_timeout_ms=0) as conn:
            with conn.cursor() as cursor:
                cursor.execute("select pg_sleep(300)")

    def keep_failure(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=keep_failure, args=(run,)) for run in (copy, query)]
    with query_connection(dropped.settings(), "test") as conn:
        [table] = published_tables(conn, "pub")
    for thread in threads:
        thread.start()
    sleeping = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'"
    admin = Database(source.standby.server, "postgres")
    wait_until(lambda: admin.value(sleeping) == 2, "the statements")
    drop_database(dropped)
    for thread in threads:
        thread.join(60)
    [copy_failure] = [failure for failure in failures if isinstance(failure, ServerError)]
    assert copy_failure.sqlstate == "57P04"
    ended = reading_failure(settings, table.relation, copy_failure, is_standby=True)
    assert isinstance(ended, SnapshotEnded)
    # libpq does not report the SQLSTATE of a statement whose session has ended.
    [query_failure] = [failure for failure in failures if failure is not copy_failure]
    assert isinstance(query_failure, ConnectionLost)
    # A capture may read from a standby: its other errors are those of a lost connection.
    lost = reported_failure(settings.describe(), "x", copy_failure.sqlstate, copy_failure.message)
    assert isinstance(lost, ConnectionLost)
    stream = stream_failure(settings.describe(), "s", "pub", copy_failure)
    assert isinstance(stream, ConnectionLost)
    # The next attempt names the database, once the drop is complete.
    source.wait_for_replay()
    with pytest.raises(ConfigurationError, match=r"does not exist\. Check the database"):
        connect(settings, "test")


def test_a_heartbeat_message_on_a_standby_is_a_transient_error(source: Source) -> None:
    """The server was the primary before a switchover."""
    with query_connection(source.standby.settings(), "test") as conn:
        for _ in range(2):
            with pytest.raises(TransientError, match=r"No heartbeat was written: .*recovery"):
                emit_heartbeat(conn)
