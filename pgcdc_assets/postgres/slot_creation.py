"""Making a slot together with the snapshot that it begins at.

The text of the server's errors is not enough here: a creation that timed out has to name the
transaction it waited for, and a full server the slots that nobody reads.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2
from psycopg2.errors import (
    ConfigurationLimitExceeded,
    DuplicateObject,
    InsufficientPrivilege,
    LockNotAvailable,
    ObjectNotInPrerequisiteState,
    QueryCanceled,
)
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.errors import connection_failure, statement_failure

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# A transaction that was open when the slot's creation began is what it waits for. Prepared
# transactions have no process.
_OPEN_TRANSACTIONS = """
select l.transactionid::text, l.pid, p.gid
  from pg_locks l
  left join pg_prepared_xacts p on p.transaction = l.transactionid
 where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
 order by age(l.transactionid) desc
 limit 1
"""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that the creation of a slot has to wait for.

    Attributes:
        pid: None for a prepared transaction, which has no process.
        gid: the name of a prepared transaction.
    """

    xid: str
    pid: int | None
    gid: str | None

    def describe(self) -> str:
        """Name it."""
        if self.pid is None:
            return f"the prepared transaction {self.gid!r} (xid {self.xid})"
        return f"the open transaction {self.xid} of process {self.pid}"

    def remedy(self) -> str:
        """Say how to end it."""
        if self.pid is None:
            return f"commit prepared or rollback prepared {self.gid!r} ends it"
        return f"select pg_terminate_backend({self.pid}) ends it"


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """The moment a slot was made: what committed before `consistent_point` is in the snapshot, what
    commits at or after it is in the stream.

    Attributes:
        taken_at: by the server's clock, before the moment: later commits have later times.
    """

    slot: str
    consistent_point: Lsn
    snapshot_name: str
    taken_at: dt.datetime


@contextlib.contextmanager
def create_slot(
    settings: ConnectionSettings, slot: str, temporary: bool = False, *, failover: bool = False
) -> Iterator[ExportedSnapshot]:
    """Create a pgoutput slot and keep its snapshot open inside the block.

    The publication has to exist before: decoding looks it up as of the WAL it reads. Creation waits
    for transactions that are open now, which only `lock_timeout` bounds; then nothing of the slot
    is left.

    Args:
        failover: let standbys keep a copy of the slot (PG 17 and newer).

    Raises:
        ConfigurationError: no free slot or walsender, wal_level is not logical, no REPLICATION
            privilege, or a slot of that name exists.
        TransientError: an open transaction did not end within `settings.lock_timeout_ms`.
        ConnectionLost: the server is down, or went away.
    """
    conninfo = settings.conninfo_for(
        "snapshot", replication=True, lock_timeout_ms=settings.lock_timeout_ms
    )
    server = settings.describe()
    try:
        connection = psycopg2.connect(conninfo, connection_factory=LogicalReplicationConnection)
    except psycopg2.Error as error:
        raise connection_failure(server, str(error)) from error
    with contextlib.closing(connection), connection.cursor() as cursor:
        try:
            if connection.server_version >= 170000:
                # Unlike its siblings this limit cannot be pinned at start-up: PG 16 does not know
                # it.
                cursor.execute("set transaction_timeout = 0")
            cursor.execute("select clock_timestamp()")
            clock = cursor.fetchone()
            cursor.execute(_creation(slot, temporary, failover))
            row = cursor.fetchone()
        except psycopg2.Error as error:
            raise _creation_failure(settings, slot, error) from error
        assert row is not None and clock is not None
        yield ExportedSnapshot(slot, Lsn.parse(row[1]), row[2], clock[0])


def oldest_open_transaction(conn: Connection) -> OpenTransaction | None:
    """Find the oldest transaction that has written something and is still open, in any database."""
    with conn.cursor() as cursor:
        cursor.execute(_OPEN_TRANSACTIONS)
        row = cursor.fetchone()
    return None if row is None else OpenTransaction(*row)


def _creation(slot: str, temporary: bool, failover: bool) -> str:
    # The replication grammar takes no parameters; slot names are checked to be [a-z0-9_].
    if not slot or not set(slot) <= set("abcdefghijklmnopqrstuvwxyz0123456789_") or len(slot) > 63:
        raise ConfigurationError(
            reason=f"Replication slot {slot!r}: a slot's name has 1 to 63 lower-case letters, "
            f"digits "
            "and underscores. Choose another name."
        )
    kind = " TEMPORARY" if temporary else ""
    options = "(SNAPSHOT 'export', FAILOVER)" if failover else "EXPORT_SNAPSHOT"
    return f'CREATE_REPLICATION_SLOT "{slot}"{kind} LOGICAL pgoutput {options}'


def _creation_failure(
    settings: ConnectionSettings, slot: str, error: psycopg2.Error
) -> BaseException:
    server = settings.describe()
    if isinstance(error, LockNotAvailable | QueryCanceled):
        return TransientError(
            reason=f"Replication slot {slot} was not created within {settings.lock_timeout_ms} ms: "
            f"{_blocker(settings)} Nothing is left of the slot; wait for that transaction or "
            "end it, then run it again."
        )
    if isinstance(error, DuplicateObject):
        return ConfigurationError(
            reason=f"Replication slot {slot} exists already on {server}. Use it, choose another "
            f"name, or drop it once nobody needs it: select pg_drop_replication_slot('{slot}')"
        )
    if isinstance(error, ConfigurationLimitExceeded):
        return ConfigurationError(
            reason=f"No free replication slot on {server}: all of max_replication_slots are "
            "taken. Drop one that nobody needs (select slot_name, active from "
            "pg_replication_slots), or raise "
            "max_replication_slots and restart the server."
        )
    if isinstance(error, ObjectNotInPrerequisiteState):
        return ConfigurationError(
            reason=f"wal_level of {server} is not logical. Mend it with: alter system set "
            "wal_level = logical; then restart the server (Amazon RDS: parameter "
            "rds.logical_replication = 1)."
        )
    if isinstance(error, InsufficientPrivilege):
        return ConfigurationError(
            reason=f"The role of {server} may not create replication slots. Grant it with: alter "
            f'role "{server.rpartition(" as ")[2]}" replication'
        )
    return statement_failure(server, f"creating slot {slot}", error) or error


def _blocker(settings: ConnectionSettings) -> str:
    with query_connection(settings, "check") as conn:
        found = oldest_open_transaction(conn)
    if found is None:
        return "it waited for a transaction that has ended meanwhile."
    return f"it waits for {found.describe()} ({found.remedy()})."
