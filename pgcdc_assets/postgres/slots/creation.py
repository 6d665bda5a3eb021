"""Creation of a slot together with its exported snapshot.

The server's error text is insufficient here. The error of a creation that timed out names the
transaction that blocks the creation. The error of a server without a free slot names the remedy.

Source: CREATE_REPLICATION_SLOT, Postgres documentation, 53.4 Streaming Replication Protocol.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2
from psycopg2.errors import (
    ConfigurationLimitExceeded,
    DuplicateObject,
    InsufficientPrivilege,
    LockNotAvailable,
    ObjectInUse,
    ObjectNotInPrerequisiteState,
    QueryCanceled,
)
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.errors import ConfigurationError, SlotBusy, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.blocking_transactions import oldest_blocking_transaction
from pgcdc_assets.postgres.connection import (
    ConnectionSettings,
    lift_transaction_timeout,
    query_connection,
)
from pgcdc_assets.postgres.errors import connection_failure, statement_failure
from pgcdc_assets.postgres.managed_services import MANAGED_BY_SQL, wal_level_remedy
from pgcdc_assets.postgres.recovery_conflicts import CONFLICTS, conflict_error, is_hot_standby
from pgcdc_assets.postgres.slots.standby_creation import StandbyCreation
from pgcdc_assets.postgres.wal.positions import PRIMARY_TIMELINE_SQL
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """An exported snapshot, and its LSN.

    A transaction that commits before `consistent_point` is in the snapshot. A transaction that
    commits at or after `consistent_point` is in the stream.

    Attributes:
        slot: the name of the slot that exported the snapshot; empty without one.
        consistent_point: LSN at which the stream of the slot begins.
        snapshot_name: argument of SET TRANSACTION SNAPSHOT.
        taken_at: the server's clock before the creation; later commits have later times.
        table_ids: OIDs of the tables for which the LSN is exact; None: all tables.
        timeline: the timeline of the LSN; None: of a standby, not known.
    """

    slot: str
    consistent_point: Lsn
    snapshot_name: str
    taken_at: dt.datetime
    table_ids: frozenset[int] | None = None
    timeline: int | None = None

    def is_exact_for(self, table_ids: Iterable[int]) -> bool:
        """Return whether the LSN is exact for tables."""
        return self.table_ids is None or self.table_ids.issuperset(table_ids)


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """The options of CREATE_REPLICATION_SLOT. A logical slot always reserves WAL.

    Attributes:
        temporary: the server drops the slot at the end of the session.
        two_phase: the server sends a transaction when it is prepared (PG 15 and newer).
        failover: standbys may keep a copy of the slot (PG 17 and newer).
        exports_snapshot: the creation exports a snapshot.
    """

    temporary: bool = False
    two_phase: bool = False
    failover: bool = False
    exports_snapshot: bool = True

    def statement_sql(self, slot: str, server_version: int) -> str:
        """Return the command that creates a slot, in the syntax of the server's version.

        Args:
            slot: the slot's name.
            server_version: version of the server as of `server_version_num`, such as 160004.

        Raises:
            ConfigurationError: the name is not a slot's name, or the server lacks an option.
        """
        create = f"CREATE_REPLICATION_SLOT {_quoted_slot(slot)}"
        create += f"{' TEMPORARY' if self.temporary else ''} LOGICAL pgoutput"
        if self.failover:
            check_failover(server_version)
        if server_version < 150000:
            if self.two_phase:
                raise ConfigurationError(
                    reason="A slot with `two_phase` requires Postgres 15, and the server has "
                    f"version {server_version // 10000}."
                )
            return f"{create} {'EXPORT' if self.exports_snapshot else 'NOEXPORT'}_SNAPSHOT"
        options = [f"SNAPSHOT '{'export' if self.exports_snapshot else 'nothing'}'"]
        options += ["TWO_PHASE"] if self.two_phase else []
        options += ["FAILOVER"] if self.failover else []
        return f"{create} ({', '.join(options)})"


def check_failover(server_version: int, in_recovery: bool = False) -> None:
    """Raise an error if a server has no slots with `failover`.

    Raises:
        ConfigurationError: the server is older than Postgres 17, or a standby.
    """
    if server_version < 170000:
        raise ConfigurationError(
            reason="A slot with `failover` requires Postgres 17, and the server has version "
            f"{server_version // 10000}. Set failover to false.",
            setting="failover",
        )
    if in_recovery:
        raise ConfigurationError(
            reason="A slot of a standby cannot have `failover`. Set failover to false, or connect "
            "to the primary.",
            setting="failover",
        )


def enable_failover(settings: ConnectionSettings, slot: str) -> None:
    """Let standbys keep a copy of an existing, inactive slot (PG 17 and newer).

    Raises:
        ConfigurationError: the server refuses the change.
        SlotBusy: a walsender reads the slot.
        ConnectionLost: the server is down, or went away.
    """
    server = settings.describe()
    with _replication_connection(settings) as connection, connection.cursor() as cursor:
        try:
            cursor.execute(f"ALTER_REPLICATION_SLOT {_quoted_slot(slot)} (FAILOVER)")
        except ObjectInUse as error:
            raise SlotBusy(slot=slot) from error
        except psycopg2.Error as error:
            failure = statement_failure(server, f"setting failover of slot {slot}", error)
            raise failure or ConfigurationError(
                reason=f"Replication slot {slot} does not get `failover`: "
                f"{error.diag.message_primary}. Set failover to false.",
                setting="failover",
            ) from error


@contextlib.contextmanager
def create_slot(
    settings: ConnectionSettings,
    slot: str,
    temporary: bool = False,
    *,
    options: SlotOptions | None = None,
) -> Iterator[ExportedSnapshot]:
    """Create a pgoutput slot, and keep its snapshot open inside the block.

    Create the publication before the slot: decoding looks up the publication as of the WAL
    position. The creation waits for all open transactions, at most `settings.lock_timeout_ms`.
    After a timeout, the server drops the incomplete slot. On a standby, `settings.primary` helps
    the creation; without it, the creation waits for at least a minute.

    Args:
        settings: the source database.
        slot: the slot's name.
        temporary: the server drops the slot at the end of the block.
        options: all options, in place of `temporary`.

    Raises:
        ConfigurationError: no free slot or walsender, wal_level is not logical, no REPLICATION
            privilege, or a slot of that name exists.
        TransientError: an open transaction did not end in time, or a standby received no record of
            running transactions, or replayed what is in conflict with the creation.
        ConnectionLost: the server is down, or went away.
    """
    chosen = options or SlotOptions(temporary=temporary)
    with _replication_connection(settings) as connection, connection.cursor() as cursor:
        create = chosen.statement_sql(slot, connection.server_version)
        standby = None
        try:
            lift_transaction_timeout(connection)
            cursor.execute(f"select clock_timestamp(), {PRIMARY_TIMELINE_SQL}")
            clock = cursor.fetchone()
            if is_hot_standby(connection):
                standby = StandbyCreation(connection, settings)
                with standby.running():
                    cursor.execute(create)
            else:
                cursor.execute(create)
            row = cursor.fetchone()
        except psycopg2.Error as error:
            failure = None if standby is None else standby.failure(slot)
            raise failure or _creation_failure(settings, slot, error) from error
        assert row is not None and clock is not None
        taken_at, timeline = clock
        start, name = Lsn.parse(row[1]), row[2] or ""
        yield ExportedSnapshot(slot, start, name, taken_at, timeline=timeline)


@contextlib.contextmanager
def _replication_connection(settings: ConnectionSettings) -> Iterator[Connection]:
    conninfo = settings.conninfo_for(
        "snapshot", replication=True, lock_timeout_ms=settings.lock_timeout_ms
    )
    try:
        connection = psycopg2.connect(conninfo, connection_factory=LogicalReplicationConnection)
    except psycopg2.Error as error:
        raise connection_failure(settings.describe(), str(error), settings.variable) from error
    with contextlib.closing(connection):
        yield connection


def _quoted_slot(slot: str) -> str:
    # The replication grammar has no parameters: insert the name only if all characters are safe.
    if not slot or not set(slot) <= set("abcdefghijklmnopqrstuvwxyz0123456789_") or len(slot) > 63:
        raise ConfigurationError(
            reason=f"Replication slot {slot!r}: a slot's name has 1 to 63 lower-case letters, "
            "digits and underscores. Choose another name."
        )
    return f'"{slot}"'


def _creation_failure(
    settings: ConnectionSettings, slot: str, error: psycopg2.Error
) -> BaseException:
    server = settings.describe()
    if error.pgcode in CONFLICTS:
        return conflict_error(server, f"the creation of slot {slot}")
    if isinstance(error, LockNotAvailable | QueryCanceled):
        return TransientError(
            reason=f"Replication slot {slot} was not created within {settings.lock_timeout_ms} ms: "
            f"{_blocker(settings)} The incomplete slot was dropped. Wait for the end of the "
            "transaction, then run it again."
        )
    if isinstance(error, DuplicateObject):
        return ConfigurationError(
            reason=f"Replication slot {slot} exists already on {server}. Use this slot, choose "
            "another name, or drop the slot if no other program uses it: select "
            f"pg_drop_replication_slot('{slot}')"
        )
    if isinstance(error, ConfigurationLimitExceeded):
        return ConfigurationError(
            reason=f"No free replication slot on {server}: max_replication_slots is reached. Drop "
            "an unused slot (select slot_name, active from pg_replication_slots), or raise "
            "max_replication_slots and restart the server."
        )
    if isinstance(error, ObjectNotInPrerequisiteState):
        return ConfigurationError(
            reason=f"wal_level of {server} is not logical, or of its primary if it is a standby. "
            + _wal_level_remedy(settings)
        )
    if isinstance(error, InsufficientPrivilege):
        return ConfigurationError(
            reason=f"The role of {server} may not create replication slots. Grant it with: alter "
            f"role {quoted(settings.role)} replication (on Amazon RDS: grant rds_replication to "
            f"{quoted(settings.role)})"
        )
    return statement_failure(server, f"creating slot {slot}", error) or error


def _wal_level_remedy(settings: ConnectionSettings) -> str:
    with query_connection(settings, "check") as conn, conn.cursor() as cursor:
        cursor.execute(f"select {MANAGED_BY_SQL}")
        row = cursor.fetchone()
    assert row is not None
    return wal_level_remedy(row[0])


def _blocker(settings: ConnectionSettings) -> str:
    with query_connection(settings, "check") as conn:
        found = oldest_blocking_transaction(conn)
    if found is None:
        return "the creation waited for a transaction that has ended by now."
    return f"the creation waits for {found.describe()} ({found.remedy()})."
