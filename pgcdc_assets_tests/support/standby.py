"""A primary and a streaming standby of it, made by pg_basebackup."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from psycopg2 import sql
from psycopg2.errors import DeadlockDetected, SerializationFailure

from pgcdc_assets.demo.programs import binaries, run_program
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.lsn import Lsn
from pgcdc_assets_tests.support.database import Database, create_database, drop_database
from pgcdc_assets_tests.support.server_folder import new_server_folder
from pgcdc_assets_tests.support.servers import SETTINGS
from pgcdc_assets_tests.support.waits import wait_until


def start_standby(primary: EmbeddedServer, standby: EmbeddedServer, slot: str) -> None:
    """Copy a running primary to a new standby with a physical slot, and start the standby."""
    Database(primary, "postgres").execute(
        "select pg_create_physical_replication_slot(%s, true)", (slot,)
    )
    standby._make_folders()
    # pg_basebackup of 18 copies earlier versions too, whose archives may lack the program.
    newest = binaries(18)
    assert newest is not None
    own = standby.bin_dir / "pg_basebackup"
    status, said = run_program(
        own if own.exists() else newest / "pg_basebackup",
        *("-D", str(standby.data_dir), "-d", primary.conninfo(), "-R"),
        *("-S", slot, "-c", "fast", "--no-sync"),
    )
    assert status == 0, said
    # The copied port is the primary's.
    (standby.data_dir / "pgcdc.conf").unlink()
    # -R writes options that libpq of earlier versions does not know. The last line counts.
    conninfo = primary.conninfo().replace("'", "''")
    with (standby.data_dir / "postgresql.auto.conf").open("a") as file:
        file.write(f"primary_conninfo = '{conninfo}'\n")
    standby.start()


def wait_for_replay(primary: Database, standby: Database) -> Lsn:
    """Wait until a standby has replayed all that the primary has committed, and return the LSN."""
    primary.transaction("set local synchronous_commit = on", "create temporary table flushed ()")
    end = Lsn.parse(primary.value("select pg_current_wal_flush_lsn()::text"))

    def is_replayed() -> bool:
        # The replay of a VACUUM may cancel this query too.
        with contextlib.suppress(SerializationFailure):
            return Lsn.parse(standby.value("select pg_last_wal_replay_lsn()::text")) >= end
        return False

    wait_until(is_replayed, "the standby to have all")
    return end


@contextlib.contextmanager
def recovery_conflicts(primary: Database, *tables: str) -> Iterator[None]:
    """Remove dead rows and lock tables exclusively, which ends sessions of the standby."""
    stop = threading.Event()
    names = sql.SQL(", ").join(map(sql.Identifier, tables))

    def run() -> None:
        with primary.connect() as conn, conn.cursor() as cursor:
            while not stop.wait(0.1):
                cursor.execute(sql.SQL("vacuum {}").format(names))
                with contextlib.suppress(DeadlockDetected):
                    cursor.execute(
                        sql.SQL("lock table {} in access exclusive mode; select 1").format(names)
                    )

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@dataclass(frozen=True)
class StandbyPair:
    """A primary and its standby."""

    primary: EmbeddedServer
    standby: EmbeddedServer


@dataclass(frozen=True)
class Source:
    """A database of a primary, and the same database of its standby."""

    primary: Database
    standby: Database

    def wait_for_replay(self) -> Lsn:
        return wait_for_replay(self.primary, self.standby)

    def wait_for_invalidation(self, is_lost: Callable[[], bool]) -> None:
        """Remove catalog rows of the primary until a logical slot of the standby is lost.

        Args:
            is_lost: returns whether the slot is lost.
        """

        def is_invalidated() -> bool:
            # A VACUUM keeps the rows if another process of the primary has an old snapshot.
            self.primary.execute("create table u (id int); drop table u")
            self.primary.execute("vacuum pg_class")
            self.wait_for_replay()
            return is_lost()

        wait_until(is_invalidated, "the invalidation")

    @contextlib.contextmanager
    def standby_setting(self, name: str, value: str) -> Iterator[None]:
        """Change a setting of the standby for the block."""
        admin = Database(self.standby.server, "postgres")
        admin.execute(f"alter system set {name} = '{value}'")
        admin.value("select pg_reload_conf()")
        wait_until(lambda: self.standby.value(f"show {name}") == value, "the setting")
        try:
            yield
        finally:
            admin.execute(f"alter system reset {name}")
            admin.value("select pg_reload_conf()")
            wait_until(lambda: self.standby.value(f"show {name}") != value, "the setting")

    def remove_rows(self, condition: str) -> None:
        """Delete and vacuum rows of table `t`, which ends the standby's snapshots that see them.

        Otherwise the standby waits: a conflict of a catalog would end sessions at any time.
        """
        with self.standby_setting("max_standby_streaming_delay", "0"):
            self.primary.execute(f"delete from t where {condition}")
            self.primary.execute("vacuum (truncate off) t")
            self.wait_for_replay()


@pytest.fixture(scope="module")
def standby_pair(server: EmbeddedServer) -> Iterator[StandbyPair]:
    """A primary and a standby, shared by the tests of a module."""
    folder = new_server_folder("standby")
    primary = EmbeddedServer(folder / "primary", server.version, SETTINGS)
    standby = EmbeddedServer(folder / "standby", server.version, SETTINGS)
    try:
        primary.start()
        start_standby(primary, standby, "standby")
        yield StandbyPair(primary, standby)
    finally:
        primary.remove()
        standby.remove()
        folder.rmdir()


@pytest.fixture
def source(standby_pair: StandbyPair) -> Iterator[Source]:
    """A new database of the pair."""
    primary = create_database(standby_pair.primary)
    found = Source(primary, Database(standby_pair.standby, primary.name))
    try:
        admin = Database(standby_pair.standby, "postgres")
        wait_for_replay(Database(standby_pair.primary, "postgres"), admin)
        yield found
    finally:
        drop_database(primary)
