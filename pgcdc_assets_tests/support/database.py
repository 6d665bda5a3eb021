"""A new database for each test, which is dropped with its slots after the test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg2
import pytest
from psycopg2 import sql
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets_tests.support.waits import wait_until

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import ConnectionSettings

# No server listens there.
NOWHERE = "postgresql://reader@127.0.0.1:1/nowhere"


class Database:
    """A database of a test server."""

    def __init__(self, server: EmbeddedServer, name: str) -> None:
        self.server = server
        self.name = name

    @property
    def conninfo(self) -> str:
        return self.server.conninfo(self.name)

    def settings(self, name: str = "test", **options: Any) -> ConnectionSettings:
        """Return the package's connection settings for this database."""
        from pgcdc_assets.postgres.connection import ConnectionSettings

        return ConnectionSettings(conninfo=self.conninfo, name=name, **options)

    @contextmanager
    def connect(self, *, autocommit: bool = True) -> Iterator[psycopg2.extensions.connection]:
        """Open a connection inside the block. Without autocommit, the caller commits."""
        with closing(psycopg2.connect(self.conninfo, application_name="test")) as connection:
            connection.autocommit = autocommit
            yield connection

    def execute(
        self, statement: str | sql.Composable, parameters: Sequence[Any] | None = None
    ) -> None:
        """Execute statements. Several statements are one implicit transaction."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(statement, parameters)

    def transaction(self, *statements: str) -> None:
        """Execute the statements in one transaction."""
        with self.connect(autocommit=False) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            connection.commit()

    def query(
        self, statement: str | sql.Composable, parameters: Sequence[Any] | None = None
    ) -> list[tuple[Any, ...]]:
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall()

    def value(self, statement: str, parameters: Sequence[Any] | None = None) -> Any:
        """Return the first column of the first row."""
        return self.query(statement, parameters)[0][0]

    def replication_command(self, command: str) -> None:
        """Execute a command of the replication protocol."""
        with (
            closing(
                psycopg2.connect(self.conninfo, connection_factory=LogicalReplicationConnection)
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(command)

    def prepare(self, gid: str, *statements: str, end: str = "") -> None:
        """Prepare a transaction of the statements, and end it by `commit` or `rollback`."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute("begin; set local synchronous_commit = on")
            for statement in statements:
                cursor.execute(statement)
            cursor.execute("prepare transaction %s", (gid,))
            if end:
                cursor.execute(f"{end} prepared %s", (gid,))

    def end_prepared(self, gid: str, end: str = "commit") -> None:
        """End a prepared transaction by `commit` or `rollback`."""
        self.execute(f"{end} prepared %s", (gid,))

    def roll_back_prepared(self) -> None:
        """Roll back all prepared transactions of the database."""
        for (gid,) in self.query(
            "select gid from pg_prepared_xacts where database = current_database()"
        ):
            self.end_prepared(gid, "rollback")

    @contextmanager
    def unreserved_slots(self) -> Iterator[None]:
        """Let the server's slots retain more WAL than it allows; a checkpoint makes them lost."""
        self.execute("alter system set max_slot_wal_keep_size = '1MB'")
        try:
            self.execute("select pg_reload_conf()")
            for _ in range(3):
                # Test servers commit asynchronously. This commit flushes the WAL before the switch.
                self.transaction(
                    "set local synchronous_commit = on",
                    "select pg_logical_emit_message(true, 'x', 'y')",
                )
                self.execute("select pg_switch_wal()")
            yield
        finally:
            self.execute("alter system reset max_slot_wal_keep_size")
            self.execute("select pg_reload_conf()")

    def drop_slots(self) -> None:
        """Drop the database's replication slots, and terminate their walsenders."""
        for slot, _ in self._slots():
            wait_until(partial(self._drop_slot, slot), f"slot {slot} to be dropped")

    def _slots(self) -> list[tuple[Any, ...]]:
        return self.query(
            "select slot_name, active_pid from pg_replication_slots "
            "where database = current_database() and not temporary"
        )

    def _drop_slot(self, slot: str) -> bool:
        active = dict(self._slots())
        if slot not in active:
            return True
        try:
            if active[slot] is not None:
                self.execute("select pg_terminate_backend(%s)", (active[slot],))
            self.execute("select pg_drop_replication_slot(%s)", (slot,))
        except psycopg2.errors.ObjectInUse:
            return False
        return True


def create_database(server: EmbeddedServer, name: str | None = None) -> Database:
    """Create an empty database on a running server."""
    database = Database(server, name or f"t_{uuid.uuid4().hex[:12]}")
    Database(server, "postgres").execute(
        sql.SQL("create database {}").format(sql.Identifier(database.name))
    )
    return database


def drop_database(database: Database) -> None:
    """Drop a database with its slots, and terminate all its connections."""
    database.server.start()
    database.drop_slots()
    database.roll_back_prepared()
    wait_until(partial(_drop, database), f"database {database.name} to be dropped")


def _drop(database: Database) -> bool:
    statement = sql.SQL("drop database {} with (force)").format(sql.Identifier(database.name))
    try:
        Database(database.server, "postgres").execute(statement)
    except psycopg2.errors.ObjectInUse:
        # A temporary slot exists until its session has ended.
        return False
    return True


@pytest.fixture
def database(server: EmbeddedServer) -> Iterator[Database]:
    """Create an empty database."""
    server.start()
    database = create_database(server)
    try:
        yield database
    finally:
        drop_database(database)
