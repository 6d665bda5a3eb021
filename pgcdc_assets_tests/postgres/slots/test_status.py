"""Slots: status, creation with a snapshot, and drop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg2
import pytest
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConfigurationError, SlotBusy
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.slots.status import (
    SlotStatus,
    check_slot_usable,
    create_slot,
    drop_slot,
    read_server_identity,
    read_slot_status,
)
from pgcdc_assets.postgres.stream.slot_peeks import has_publication_gap
from pgcdc_assets.postgres.wal.positions import read_current_lsn
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


@contextmanager
def _held(database: Database, slot: str) -> Iterator[None]:
    """Hold the slot by a walsender during the block.

    The walsender starts at the end of the WAL: earlier changes may belong to no publication, which
    would end it on Postgres 17 and older.
    """
    with closing(_connect(database)) as stream, stream.cursor() as cursor:
        cursor.start_replication(
            slot,
            start_lsn=database.value("select pg_current_wal_insert_lsn()::text"),
            options={"proto_version": "1", "publication_names": "pub"},
        )
        wait_until(lambda: _is_held(database, slot), "the walsender to hold the slot")
        yield
    wait_until(lambda: not _is_held(database, slot), "the walsender to end")


def _connect(database: Database) -> LogicalReplicationConnection:
    conninfo = database.settings("shop").conninfo_for("capture", replication=True)
    return psycopg2.connect(conninfo, connection_factory=LogicalReplicationConnection)


def _is_held(database: Database, slot: str) -> bool:
    return bool(
        database.value(
            "select active_pid is not null from pg_replication_slots where slot_name = %s", (slot,)
        )
    )


@pytest.mark.every_pg
def test_a_slot_is_read_with_the_servers_position_in_one_statement(database: Database) -> None:
    slot = f"s_{database.name}"
    with query_connection(database.settings(), "sensor") as conn:
        assert read_slot_status(conn, slot) is None
        with create_slot(database.settings(), slot) as snapshot:
            pass
        database.execute("create table t as select generate_series(1, 10000)")

        def with_lag() -> SlotStatus | None:
            status = read_slot_status(conn, slot)
            assert status is not None
            return status if (status.lag_bytes or 0) > 100_000 else None

        status = wait_until(with_lag, "lag")
        assert status.confirmed_flush_lsn == snapshot.consistent_point
        assert (status.plugin, status.slot_type, status.database) == (
            "pgoutput",
            "logical",
            database.name,
        )
        assert status.current_lsn <= read_current_lsn(conn)
        assert status.lag_bytes is not None and status.retained_bytes is not None
        assert status.retained_bytes >= status.lag_bytes
        assert (status.wal_status, status.active_pid, status.is_lost) == ("reserved", None, False)
        assert status.lag_seconds is None
        if database.server.version >= 17:
            assert status.inactive_since is not None


@pytest.mark.every_pg
def test_each_field_of_a_status_equals_the_server_s_value(database: Database) -> None:
    slot = f"s_{database.name}"
    with create_slot(database.settings(), slot):
        pass
    for _ in range(20):
        database.value("select pg_current_xact_id()::text")
    database.execute("alter system set max_slot_wal_keep_size = '1GB'")
    try:
        database.value("select pg_reload_conf()")
        with query_connection(database.settings(), "sensor") as conn:

            def limited() -> SlotStatus | None:
                status = read_slot_status(conn, slot)
                return status if status is not None and status.safe_wal_size is not None else None

            before = database.value("select clock_timestamp()")
            status = wait_until(limited, "the limit of kept WAL")
            [(after, safe_wal_size, xmin_age, began_with_statistics)] = database.query(
                "select clock_timestamp(), s.safe_wal_size, age(s.catalog_xmin), "
                "w.stats_reset > pg_postmaster_start_time() "
                "from pg_replication_slots s, pg_stat_bgwriter w where slot_name = %s",
                (slot,),
            )
    finally:
        database.execute("alter system reset max_slot_wal_keep_size")
        database.value("select pg_reload_conf()")
    assert before <= status.server_time <= after
    # The server sometimes writes a record and assigns a transaction ID by itself.
    assert safe_wal_size <= (status.safe_wal_size or 0) <= safe_wal_size + 2**20
    assert xmin_age >= 20
    assert 0 <= xmin_age - (status.catalog_xmin_age or 0) <= 10
    assert status.may_have_crashed is began_with_statistics
    assert status.is_counted_since_creation
    assert [status.in_recovery, status.two_phase, status.is_synced, status.temporary] == [False] * 4


def test_a_slot_that_confirmed_all_wal_has_no_lag_in_seconds(database: Database) -> None:
    slot = f"s_{database.name}"
    with create_slot(database.settings(), slot):
        pass

    with query_connection(database.settings(), "sensor") as conn:

        def advanced() -> SlotStatus | None:
            database.value(
                "select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", (slot,)
            )
            status = read_slot_status(conn, slot)
            return status if status is not None and status.lag_bytes == 0 else None

        status = wait_until(advanced, "the slot to confirm all")
    assert status.lag_seconds == 0.0


@pytest.mark.every_pg
def test_the_reader_of_a_slot_is_named(database: Database) -> None:
    slot, settings = f"s_{database.name}", database.settings("shop")
    database.execute("create publication pub")
    with create_slot(settings, slot):
        pass
    with (
        closing(_connect(database)) as stream,
        query_connection(settings, "sensor") as conn,
    ):
        with stream.cursor() as cursor:
            cursor.start_replication(
                slot, options={"proto_version": "1", "publication_names": "pub"}
            )
        status = read_slot_status(conn, slot)
        assert status is not None
        assert status.active_pid == stream.info.backend_pid
        assert status.active_application_name == "pgcdc capture shop"
        with pytest.raises(SlotBusy, match=str(stream.info.backend_pid)) as busy:
            drop_slot(conn, slot)
        assert busy.value.slot == slot
        assert busy.value.application_name == "pgcdc capture shop"


@pytest.mark.every_pg
def test_the_lag_in_seconds_is_that_of_the_slot_s_own_reader(database: Database) -> None:
    """The reader of the other slot confirms nothing, so the server knows no lag of it."""
    settings = database.settings("shop")
    database.execute("create table t (id int)")
    database.execute("create publication pub for all tables")
    slots = [f"{name}_{database.name}" for name in ("s", "other")]
    for slot in slots:
        with create_slot(settings, slot):
            pass
    with query_connection(settings, "sensor") as conn, closing(_connect(database)) as stream:
        with stream.cursor() as cursor, _held(database, slots[1]):
            options = {"proto_version": "1", "publication_names": "pub"}
            cursor.start_replication(slots[0], options=options)
            reader: Any = cursor

            def with_lag() -> SlotStatus | None:
                database.execute("insert into t values (1)")
                while (message := reader.read_message()) is not None:
                    reader.send_feedback(flush_lsn=message.data_start, force=True)
                status = read_slot_status(conn, slots[0])
                assert status is not None
                return status if status.lag_seconds else None

            assert 0 < (wait_until(with_lag, "the lag of the reader").lag_seconds or 0) < 60
            other = read_slot_status(conn, slots[1])
            assert other is not None and other.lag_seconds is None


def test_statistics_are_lost_by_a_crash_and_not_by_a_restart(own_server: EmbeddedServer) -> None:
    own_server.start()
    with query_connection(ConnectionSettings(own_server.conninfo()), "sensor") as conn:
        with conn.cursor() as cursor:
            cursor.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    seen = []
    for mode in ("fast", "immediate", "fast"):
        own_server.restart(mode)
        with query_connection(ConnectionSettings(own_server.conninfo()), "sensor") as conn:
            status = read_slot_status(conn, "s")
        assert status is not None
        seen.append(status.may_have_crashed)
    assert seen == [False, True, False]


def test_a_slot_is_dropped_once(database: Database) -> None:
    slot = f"s_{database.name}"
    with create_slot(database.settings(), slot):
        pass
    with query_connection(database.settings(), "test") as conn:
        assert drop_slot(conn, slot)
        assert not drop_slot(conn, slot)


def test_a_temporary_slot_ends_with_its_connection(database: Database) -> None:
    slot = f"s_{database.name}"
    with (
        create_slot(database.settings(), slot, temporary=True),
        query_connection(database.settings(), "test") as conn,
    ):
        status = read_slot_status(conn, slot)
        assert status is not None
        assert status.temporary
    wait_until(
        lambda: (
            not database.query("select from pg_replication_slots where slot_name = %s", (slot,))
        ),
        "the temporary slot to go",
    )


@pytest.mark.every_pg
def test_slots_for_another_purpose_are_refused(database: Database) -> None:
    """The slot has another plugin or database, is physical, or is temporary."""
    database.execute("select pg_create_physical_replication_slot('physical_slot')")
    # The embedded servers do not have the contrib modules.
    has_test_decoding = "/usr/lib/postgresql" in str(database.server.bin_dir)
    if has_test_decoding:
        database.execute(
            "select pg_create_logical_replication_slot('decoding_slot', 'test_decoding')"
        )
    slot = f"s_{database.name}"
    with create_slot(database.settings(), slot):
        pass
    with query_connection(database.settings(), "test") as conn:
        for name, database_name, reason in (
            ("physical_slot", database.name, "is a physical slot"),
            (slot, "other", f"belongs to database {database.name}"),
        ):
            status = read_slot_status(conn, name)
            assert status is not None
            with pytest.raises(ConfigurationError, match=f"{name} {reason}.*pg_drop_replication"):
                check_slot_usable(status, database_name)
        drop_slot(conn, "physical_slot")
        with create_slot(database.settings(), f"{slot}_temporary", temporary=True):
            status = read_slot_status(conn, f"{slot}_temporary")
            assert status is not None
            with pytest.raises(ConfigurationError, match="is the temporary slot of another"):
                check_slot_usable(status, database.name)
        if not has_test_decoding:
            return
        status = read_slot_status(conn, "decoding_slot")
        assert status is not None
        with pytest.raises(ConfigurationError, match="belongs to the output plugin test_decoding"):
            check_slot_usable(status, database.name)


@pytest.mark.parametrize("name", ["", "With-Dash", 'a"b', "x" * 64])
def test_an_invalid_slot_name_is_refused(database: Database, name: str) -> None:
    with (
        pytest.raises(ConfigurationError, match="lower-case"),
        create_slot(database.settings(), name),
    ):
        pass


def test_a_slot_is_not_created_twice(database: Database) -> None:
    slot = f"s_{database.name}"
    with create_slot(database.settings(), slot):
        pass
    with (
        pytest.raises(ConfigurationError, match="exists already"),
        create_slot(database.settings(), slot),
    ):
        pass


@pytest.mark.every_pg
def test_a_gap_of_the_publication_is_found_without_confirming_a_change(
    database: Database,
) -> None:
    """B9: Postgres 18 and newer warn about the changes of a gap; earlier versions refuse them."""
    slot, name = f"s_{database.name}", 'a "pub"'
    quoted = f'"{name.replace(chr(34), chr(34) * 2)}"'
    database.execute(f"create table t (id int); create publication {quoted} for table t")
    with create_slot(database.settings(), slot):
        pass
    with query_connection(database.settings(), "test") as conn:

        def has_gap(publication: str = name, limit_ms: int = 600_000) -> bool:
            status = read_slot_status(conn, slot)
            assert status is not None
            return has_publication_gap(conn, database.settings(), status, publication, limit_ms)

        def change(*statements: str) -> None:
            database.transaction("set local synchronous_commit = on", *statements)

        # To decode these rows takes longer than a millisecond.
        change("insert into t select generate_series(1, 20000)")
        # The publication is older than the slot: the changes are not decoded.
        assert not has_gap()
        assert not has_gap("missing")
        confirmed = database.value("select confirmed_flush_lsn from pg_replication_slots")
        change(f"drop publication {quoted}")
        change("insert into t values (2)")
        change(f"create publication {quoted} for table t")
        assert not has_gap(limit_ms=1)
        with _held(database, slot):
            assert not has_gap()
        assert has_gap()
    assert database.value("select confirmed_flush_lsn from pg_replication_slots") == confirmed


@pytest.mark.every_pg
def test_the_server_is_identified(database: Database) -> None:
    with query_connection(database.settings(), "test") as conn:
        identity = read_server_identity(conn)
    assert identity.database == database.name
    assert identity.server_version // 10000 == database.server.version
    assert identity.timeline == 1
    assert identity.system_identifier.isdigit()


@pytest.mark.every_pg
def test_each_property_of_a_slot_is_that_of_the_server(database: Database) -> None:
    names = {option: f"{option}_{database.name}" for option in ("plain", "two_phase", "failover")}
    version = int(database.value("show server_version_num")) // 10_000
    create = "select pg_create_logical_replication_slot(%s, 'pgoutput'"
    database.execute("create publication pub for all tables")
    database.execute(f"{create})", (names["plain"],))
    database.execute(f"{create}, false, true)", (names["two_phase"],))
    if version >= 17:
        database.execute(f"{create}, false, false, true)", (names["failover"],))
    try:
        with (
            query_connection(database.settings(), "sensor") as conn,
            _held(database, names["plain"]),
        ):
            plain, two_phase, failover = (read_slot_status(conn, name) for name in names.values())
        assert plain is not None
        assert two_phase is not None
        # Postgres 14 accepts the option, and its pgoutput ignores it.
        assert (plain.two_phase, two_phase.two_phase) == (False, version >= 15)
        assert not (plain.has_failover or two_phase.has_failover)
        assert not (plain.is_synced or two_phase.is_synced)
        assert (failover is not None and failover.has_failover) is (version >= 17)
        assert failover is None or not failover.is_synced
        # An inactive slot has no reader, and its time since Postgres 17.
        assert plain.active_application_name == "pgcdc capture shop"
        assert two_phase.active_application_name is None
        assert plain.inactive_since is None
        assert (two_phase.inactive_since is not None) is (version >= 17)
        assert plain.invalidation_reason is None
        assert two_phase.catalog_xmin_age is not None
    finally:
        for name in names.values():
            database.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots "
                "where slot_name = %s",
                (name,),
            )
