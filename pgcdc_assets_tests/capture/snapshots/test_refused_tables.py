"""Tables without a possible snapshot are refused by name, and others get one (C14, B14)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg2
import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table
from pgcdc_assets.errors import ConfigurationError, DefiniteError
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.digests import DigestedColumn, open_source_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres

_REASONS = {
    "hidden": "has row-level security, which would hide rows",
    "locked": "cannot be read by this role",
    "shown": "is a view",
    "stored": "is a materialized view",
    "remote": "is a foreign table",
    "unlogged": "is unlogged",
    "absent": "does not exist",
}


@pytest.mark.every_pg
def test_tables_without_a_possible_snapshot_are_named_and_others_get_one(
    database: Database, zone: RawZone
) -> None:
    role = f"role_{database.name}"
    database.execute(f"create role {role} login replication")
    try:
        database.execute(
            f"""
            create table first (id int primary key);
            create table hidden (id int primary key);
            create table locked (id int primary key);
            create table last (id int primary key);
            insert into first values (1);
            insert into hidden values (1);
            insert into last values (1);
            alter table hidden enable row level security;
            create policy own on hidden using (id > 5);
            grant select on first, hidden, last to {role};
            create view shown as select 1 as id;
            create materialized view stored as select 1 as id;
            create unlogged table unlogged (id int primary key);
            create foreign data wrapper nothing;
            create server nowhere foreign data wrapper nothing;
            create foreign table remote (id int) server nowhere;
            create publication pub for table first, hidden, locked, last
            """
        )
        conninfo = database.conninfo.replace("user=postgres", f"user={role}")
        names = ["first", *_REASONS, "last", "first"]
        outcomes = {
            outcome.table: outcome
            for outcome in snapshot_each_table(
                ConnectionSettings(conninfo, "test"),
                zone,
                f"s_{database.name}",
                "pub",
                [TableName("public", name) for name in names],
            )
        }
        assert set(outcomes) == set(names)
        for name, reason in _REASONS.items():
            failure = outcomes[name]
            assert isinstance(failure, SnapshotFailure)
            assert isinstance(failure.error, ConfigurationError)
            assert f"public.{name} " in str(failure.error)
            assert reason in str(failure.error)
        for name in ("first", "last"):
            report = outcomes[name]
            assert isinstance(report, SnapshotReport)
            assert report.row_count == 1
        assert {copy.table for copy in zone.snapshots.complete_snapshots()} == {"first", "last"}
    finally:
        database.execute(f"drop owned by {role}; drop role {role}")


@pytest.mark.every_pg
def test_the_name_of_a_table_is_not_taken_for_row_level_security(
    database: Database, zone: RawZone
) -> None:
    """The server's sentence about a missing privilege quotes the name."""
    name = "row-level security"
    role = f"role_{database.name}"
    database.execute(f"create role {role} login replication")
    try:
        database.execute(
            f'create table "{name}" (id int primary key); create publication pub for table "{name}"'
        )
        conninfo = database.conninfo.replace("user=postgres", f"user={role}")
        [failure] = snapshot_each_table(
            ConnectionSettings(conninfo, "test"),
            zone,
            f"s_{database.name}",
            "pub",
            [TableName("public", name)],
        )
        assert isinstance(failure, SnapshotFailure)
        assert "cannot be read by this role" in str(failure.error)
        assert "bypassrls" not in str(failure.error)
    finally:
        database.execute(f"drop owned by {role}; drop role {role}")


def test_a_temporary_table_is_named(database: Database, zone: RawZone) -> None:
    """C14: only its session can see its rows, and no publication has it."""
    database.execute(
        "create table first (id int primary key); create publication pub for table first"
    )
    with database.connect() as session, session.cursor() as cursor:
        cursor.execute("create temporary table brief (id int primary key)")
        cursor.execute("select pg_my_temp_schema()::regnamespace::text")
        ((schema,),) = cursor.fetchall()
        tables = [TableName(schema, "brief"), TableName("public", "first")]
        failure, report = snapshot_each_table(
            database.settings(), zone, f"s_{database.name}", "pub", tables
        )
    assert isinstance(failure, SnapshotFailure)
    assert f"{schema}.brief is temporary" in str(failure.error)
    assert isinstance(report, SnapshotReport)


@pytest.mark.every_pg(since=15)
def test_no_error_in_the_chain_quotes_a_row(database: Database, zone: RawZone) -> None:
    """Dagster stores an error with its causes, and shows them."""
    secret = "17 secret"
    database.execute("create table t (id int primary key, v text)")
    database.execute("insert into t values (1, %s)", (secret,))
    database.execute("create publication pub for table t where (parse_ident(v) is not null)")
    slot = f"s_{database.name}"
    outcomes = snapshot_each_table(database.settings(), zone, slot, "pub")
    [failure] = [each for each in outcomes if isinstance(each, SnapshotFailure)]
    _check_chain(failure.error, secret)
    with (
        query_connection(database.settings(), "test") as conn,
        conn.cursor() as cursor,
        open_exported(cursor) as snapshot_name,
        open_source_table(
            database.settings(), "pub", TableName("public", "t"), snapshot_name
        ) as source,
    ):
        digests = source.digests([DigestedColumn("id"), DigestedColumn("v")], [0])
        with pytest.raises(DefiniteError) as by_bucket:
            digests.buckets(1)
    _check_chain(by_bucket.value, secret)


@contextmanager
def open_exported(cursor: psycopg2.extensions.cursor) -> Iterator[str]:
    """Export a snapshot, and hold it for the block."""
    cursor.execute("begin isolation level repeatable read")
    cursor.execute("select pg_export_snapshot()")
    ((name,),) = cursor.fetchall()
    yield name
    cursor.execute("rollback")


def _check_chain(error: BaseException | None, secret: str) -> None:
    assert error is not None
    while error is not None:
        assert secret not in str(error), type(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
