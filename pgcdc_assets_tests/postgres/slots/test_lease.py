"""The lease of a slot: the second capture, and the walsender of a dead capture (B4, B5, B7)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg2
import pytest
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.errors import ConfigurationError, ConnectionLost, SlotBusy, TransientError
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.slots.lease import capture_lease, wait_or_terminate_stale_walsender
from pgcdc_assets.postgres.slots.status import create_slot, read_slot_status
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres


@pytest.fixture
def slot(database: Database) -> str:
    """Create a publication and a slot, which is dropped with the database."""
    database.execute("create publication pub")
    name = f"s_{database.name}"
    with create_slot(database.settings("shop"), name):
        pass
    return name


@contextmanager
def _walsender(database: Database, slot: str, purpose: str = "capture") -> Iterator[int]:
    """Hold the slot by a walsender with a silent client; yield the pid of the walsender."""
    stream = psycopg2.connect(
        database.settings("shop").conninfo_for(purpose, replication=True),
        connection_factory=LogicalReplicationConnection,
    )
    with closing(stream), stream.cursor() as cursor:
        cursor.start_replication(slot, options={"proto_version": "1", "publication_names": "pub"})
        yield stream.info.backend_pid


def test_the_error_of_the_second_capture_names_the_holder_of_the_lease(
    database: Database, slot: str
) -> None:
    """B5."""
    settings = database.settings("shop")
    with (
        query_connection(settings, "capture") as first,
        query_connection(settings, "capture") as second,
    ):
        with capture_lease(first, "shop", slot) as lease:
            lease.verify()
            with pytest.raises(SlotBusy) as caught, capture_lease(second, "shop", slot):
                pass
            assert caught.value.active_pid == first.info.backend_pid
            assert "(pgcdc capture shop)" in str(caught.value)
            with capture_lease(second, "other", "another_slot"):
                pass
        with capture_lease(second, "shop", slot):
            pass


def test_the_lease_of_a_dead_capture_is_free(database: Database, slot: str) -> None:
    """B5: the server releases the lease with its session."""
    settings = database.settings("shop")
    with query_connection(settings, "capture") as second:
        with query_connection(settings, "capture") as first, capture_lease(first, "shop", slot):
            database.execute("select pg_terminate_backend(%s)", (first.info.backend_pid,))

        with capture_lease(second, "shop", slot):
            pass


def test_a_capture_waits_for_a_lease_that_is_released_soon(database: Database, slot: str) -> None:
    """B5: the next run starts before the server notices the killed run."""
    settings = database.settings("shop")
    with (
        query_connection(settings, "capture") as first,
        query_connection(settings, "capture") as second,
        capture_lease(first, "shop", slot),
    ):
        freed = threading.Timer(0.3, first.close)
        freed.start()
        with capture_lease(second, "shop", slot):
            assert first.closed
        freed.join()


def test_a_lost_lease_is_detected(database: Database, slot: str) -> None:
    """B6."""
    settings = database.settings("shop")
    with (
        query_connection(settings, "capture") as conn,
        capture_lease(conn, "shop", slot) as lease,
    ):
        database.execute("select pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))
        with pytest.raises(ConnectionLost, match="this landing is discarded"):
            lease.verify()


def test_a_lease_that_another_process_holds_is_detected(database: Database, slot: str) -> None:
    """B6: the session exists but has lost its locks, as behind a pooler that resets sessions."""
    settings = database.settings("shop")
    with (
        query_connection(settings, "capture") as conn,
        capture_lease(conn, "shop", slot) as lease,
        conn.cursor() as cursor,
    ):
        lease.verify()
        cursor.execute("select pg_advisory_unlock_all()")
        with pytest.raises(ConnectionLost, match="this landing is discarded"):
            lease.verify()
        with query_connection(settings, "other") as other, capture_lease(other, "shop", slot):
            with pytest.raises(ConnectionLost, match="this landing is discarded"):
                lease.verify()


@pytest.mark.every_pg
def test_a_stale_walsender_of_the_package_is_terminated(database: Database, slot: str) -> None:
    """B4."""
    with (
        _walsender(database, slot) as pid,
        query_connection(database.settings("shop"), "capture") as conn,
    ):
        ended = wait_or_terminate_stale_walsender(conn, slot, 0.1, "pgcdc capture shop")
        assert ended == pid
        status = read_slot_status(conn, slot)
        assert status is not None
        assert not status.is_active


def test_a_walsender_that_ends_soon_is_not_terminated(database: Database, slot: str) -> None:
    """B4."""
    with query_connection(database.settings("shop"), "capture") as conn:
        with _walsender(database, slot) as pid:
            timer = threading.Timer(
                0.5, database.execute, ("select pg_terminate_backend(%s)", (pid,))
            )
            timer.start()
            assert wait_or_terminate_stale_walsender(conn, slot, 30) is None
            timer.join()
        assert wait_or_terminate_stale_walsender(conn, slot, 30) is None


def test_a_stale_walsender_that_the_role_may_not_terminate_is_named(
    database: Database, slot: str
) -> None:
    database.execute("drop role if exists limited; create role limited login")
    settings = database.settings("shop")
    limited = type(settings)(settings.conninfo.replace("user=postgres", "user=limited"), "shop")
    with _walsender(database, slot) as pid, query_connection(limited, "capture") as conn:
        with pytest.raises(ConfigurationError) as caught:
            wait_or_terminate_stale_walsender(conn, slot, 0.1)
        status = read_slot_status(conn, slot)
        assert status is not None and status.active_pid == pid
    said = str(caught.value)
    assert f"select pg_terminate_backend({pid})" in said
    assert "grant pg_signal_backend to the role of the capture" in said
    database.execute("drop role limited")


def test_another_program_on_the_slot_is_named_and_not_terminated(
    database: Database, slot: str
) -> None:
    """Issue 3, bad input: a slot held by another process."""
    with (
        _walsender(database, slot, purpose="receiver") as pid,
        query_connection(database.settings("shop"), "capture") as conn,
    ):
        with pytest.raises(SlotBusy, match=rf"process {pid} \(pgcdc receiver shop\)"):
            wait_or_terminate_stale_walsender(conn, slot, 0.1, "pgcdc capture shop")
        status = read_slot_status(conn, slot)
        assert status is not None
        assert status.active_pid == pid


# Hides the walsenders of the database from as many reads of pg_stat_activity as given.
_LATE_PROCESSES = """
create schema late;
create sequence late.reads;
create view late.pg_stat_activity as
  select a.*
    from (select nextval('late.reads') as number offset 0) r
    join pg_catalog.pg_stat_activity a
      on a.backend_type <> 'walsender' or a.datname <> current_database() or r.number > {hidden};
"""


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("hidden", "name"), [(1, "pgcdc capture shop"), (2, "pgcdc capture shop"), (9, "another role")]
)
def test_a_walsender_that_began_after_the_processes_were_read_is_named(
    database: Database, slot: str, hidden: int, name: str
) -> None:
    """Postgres reads the slots and the processes one after the other."""
    database.execute(_LATE_PROCESSES.format(hidden=hidden))
    with (
        _walsender(database, slot) as pid,
        query_connection(database.settings("shop"), "capture") as conn,
    ):
        conn.cursor().execute("set search_path = late, pg_catalog")
        status = read_slot_status(conn, slot)
        assert status is not None
        assert (status.active_pid, status.active_application_name) == (pid, name)


@pytest.mark.every_pg
def test_a_stale_walsender_without_a_row_at_the_first_read_is_terminated(
    database: Database, slot: str
) -> None:
    """B4: it is not taken for another program."""
    database.execute(_LATE_PROCESSES.format(hidden=1))
    with query_connection(database.settings("shop"), "capture") as conn:
        conn.cursor().execute("set search_path = late, pg_catalog")
        with _walsender(database, slot) as pid:
            assert wait_or_terminate_stale_walsender(conn, slot, 0.1) == pid


@pytest.mark.every_pg
def test_an_open_transaction_that_blocks_the_slot_is_named(database: Database) -> None:
    """B7: the error comes after the time limit, and no incomplete slot remains."""
    slot, settings = f"s_{database.name}", database.settings(lock_timeout_ms=300)
    database.execute("create table t (id int)")
    with database.connect(autocommit=False) as blocker, blocker.cursor() as cursor:
        cursor.execute("insert into t values (1); select pg_current_xact_id()::text")
        [(xid,)] = cursor.fetchall()
        with (
            pytest.raises(TransientError) as caught,
            create_slot(settings, slot),
        ):
            pass
        message = str(caught.value)
        assert f"transaction {xid} of process {blocker.info.backend_pid}" in message
        assert "300 ms" in message
    assert (
        database.query("select slot_name from pg_replication_slots where slot_name = %s", (slot,))
        == []
    )
    with create_slot(settings, slot):
        pass
