"""Pre-flight of the server: version, WAL level, privileges of the role, slots and walsenders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.errors import ConfigurationError, PgcdcError
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.errors import connection_failure
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.postgres.slots import (
    SlotStatus,
    check_slot_usable,
    oldest_open_transaction,
    read_slot_status,
)
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_OLDEST_VERSION = 140000
_OLDEST_DECODING_STANDBY = 160000

_SERVER = """
select current_setting('server_version_num')::int, current_setting('server_version'),
       current_setting('wal_level'), pg_is_in_recovery(), current_user, current_database(),
       r.rolreplication or r.rolsuper or exists (
           select from pg_roles m where m.rolname in ('rds_replication', 'rds_superuser')
                                    and pg_has_role(current_user, m.oid, 'usage')),
       (select rolname from pg_roles
         where rolname in ('rds_superuser', 'azure_pg_admin', 'cloudsqlsuperuser') limit 1),
       current_setting('max_replication_slots')::int,
       (select count(*) from pg_replication_slots)::int,
       (select string_agg(slot_name, ', ' order by slot_name)
          from pg_replication_slots where active_pid is null),
       current_setting('max_wal_senders')::int, (select count(*) from pg_stat_replication)::int,
       current_setting('wal_sender_timeout'),
       (select setting::bigint from pg_settings where name = 'max_slot_wal_keep_size'),
       (select setting::bigint from pg_settings where name = 'idle_replication_slot_timeout')
  from pg_roles r where r.rolname = current_user
"""

# Where the setting lives on the big managed services, told by the administrator's role there.
_MANAGED_WAL_LEVEL = {
    "rds_superuser": "Set rds.logical_replication = 1 in the instance's parameter group and reboot "
    "it.",
    "azure_pg_admin": "Set wal_level to LOGICAL in the server parameters and restart the server.",
    "cloudsqlsuperuser": "Set the flag cloudsql.logical_decoding = on; the instance restarts.",
}
_WAL_LEVEL = "alter system set wal_level = logical; then restart the server."


@dataclass(frozen=True, slots=True)
class Server:
    """What the checks ask the server in one query."""

    version: int
    version_text: str
    wal_level: str
    in_recovery: bool
    role: str
    database: str
    may_replicate: bool
    managed_by: str | None
    max_slots: int
    slot_count: int
    idle_slots: str | None
    max_walsenders: int
    walsender_count: int
    wal_sender_timeout: str
    max_slot_wal_keep_mb: int
    idle_slot_timeout: int | None


def read_server(conn: Connection) -> Server:
    """Ask the server."""
    with conn.cursor() as cursor:
        cursor.execute(_SERVER)
        row = cursor.fetchone()
    assert row is not None
    return Server(*row)


def check_server(server: Server) -> Iterator[Finding]:
    """Check version, role in the cluster, WAL level and time-outs."""
    if server.version < _OLDEST_VERSION:
        yield Finding(
            "version",
            "error",
            f"Postgres is {server.version_text}.",
            "Postgres 14 or newer is needed.",
        )
    else:
        yield Finding("version", "ok", f"Postgres is {server.version_text}.")
    if server.in_recovery and server.version < _OLDEST_DECODING_STANDBY:
        yield Finding(
            "standby",
            "error",
            "The server is a standby, which decodes WAL from Postgres 16 on only.",
            "Connect to the primary.",
        )
    if server.wal_level != "logical":
        yield Finding(
            "wal_level",
            "error",
            f"wal_level is {server.wal_level}, and logical is needed.",
            _MANAGED_WAL_LEVEL.get(server.managed_by or "", _WAL_LEVEL),
        )
    else:
        yield Finding("wal_level", "ok", "wal_level is logical.")
    if server.wal_sender_timeout == "0":
        yield Finding(
            "wal_sender_timeout",
            "warning",
            "wal_sender_timeout is 0: the server never notices a connection that was cut, and its "
            "walsender holds the slot for ever.",
            "alter system set wal_sender_timeout = '1min'; select pg_reload_conf()",
        )
    if server.max_slot_wal_keep_mb < 0:
        yield Finding(
            "max_slot_wal_keep_size",
            "warning",
            "max_slot_wal_keep_size is unlimited: WAL of a slot that nobody reads fills the disk.",
            "Set it to what the disk can spare, e.g. alter system set max_slot_wal_keep_size = "
            "'100GB'; select pg_reload_conf(). A slot beyond it is lost, and a new snapshot "
            "needed.",
        )
    if server.idle_slot_timeout:
        yield Finding(
            "idle_replication_slot_timeout",
            "warning",
            "idle_replication_slot_timeout is set: the slot is lost when no capture ran for that "
            "long.",
            "alter system set idle_replication_slot_timeout = 0; select pg_reload_conf()",
        )


def check_replication(settings: ConnectionSettings, server: Server) -> Iterator[Finding]:
    """Open a replication connection, which asks privilege, pg_hba.conf and walsenders at once."""
    if not server.may_replicate:
        remedy = f"alter role {quoted(server.role)} replication"
        if server.managed_by == "rds_superuser":
            remedy = f"grant rds_replication to {quoted(server.role)}"
        yield Finding("replication", "error", f"Role {server.role} lacks REPLICATION.", remedy)
        return
    try:
        psycopg2.connect(
            settings.conninfo_for("check", replication=True),
            connection_factory=LogicalReplicationConnection,
        ).close()
    except psycopg2.Error as error:
        failure: PgcdcError = connection_failure(settings.describe(), str(error))
        yield Finding("replication", "error", f"No replication connection: {failure}")
        return
    yield Finding("replication", "ok", f"Role {server.role} may replicate, a walsender is free.")


def check_slot(
    conn: Connection, server: Server, slot: str, is_ours: bool = True
) -> Iterator[Finding]:
    """Check a slot that exists, or whether one can be made."""
    status = read_slot_status(conn, slot)
    is_streaming = status is not None and status.is_active
    room = list(_check_room(server, needs_slot=status is None, is_streaming=is_streaming))
    yield from room
    if status is None:
        if not any(finding.severity == "error" for finding in room):
            yield from _check_creation(conn, slot)
        return
    try:
        check_slot_usable(status, server.database)
    except ConfigurationError as error:
        yield Finding("slot", "error", str(error))
        return
    if status.was_read and not is_ours and not status.is_lost:
        yield Finding(
            "slot",
            "error",
            f"Replication slot {slot} was read before, through {status.confirmed_flush_lsn}, and "
            "not into this lake: another lake or program may need what it holds.",
            "Set PGCDC_LAKE to the lake that was filled from it, or give this capture a slot of "
            "its own (`slot`); if nothing else uses it: pgcdc sync --adopt-slot.",
        )
    yield from _check_health(status)


def _check_room(server: Server, *, needs_slot: bool, is_streaming: bool) -> Iterator[Finding]:
    """Check that what the commands need of slots and walsenders is free.

    A capture holds a slot and a walsender. A new snapshot of a table, `pgcdc verify` and the first
    snapshot with a slot of an administrator make a temporary slot beside it.

    Args:
        needs_slot: the capture's own slot is not there yet.
        is_streaming: a capture holds its walsender now.
    """
    free = server.max_slots - server.slot_count
    if free < 1 + needs_slot:
        idle = f" Nobody reads these now: {server.idle_slots}." if server.idle_slots else ""
        remedy = (
            "Drop one that nobody needs with select pg_drop_replication_slot(NAME), or raise "
            f"max_replication_slots and restart the server.{idle}"
        )
        if free < 1:
            yield Finding(
                "slot",
                "error",
                f"No free replication slot: all {server.max_slots} of max_replication_slots are "
                "taken.",
                remedy,
            )
        else:
            yield Finding(
                "free_slots",
                "warning",
                "One replication slot is free, which the capture takes: new snapshots of tables "
                "and pgcdc verify need another one for a moment.",
                remedy,
            )
    free_walsenders = server.max_walsenders - server.walsender_count
    # Without a free one the check of the replication connection has failed already.
    if 0 < free_walsenders < 2 - is_streaming:
        yield Finding(
            "walsenders",
            "warning",
            f"One walsender is free, of {server.max_walsenders} (max_wal_senders): a capture holds "
            "it, and new snapshots of tables and pgcdc verify need another one for a moment.",
            "Raise max_wal_senders and restart the server.",
        )


def _check_creation(conn: Connection, slot: str) -> Iterator[Finding]:
    yield Finding("slot", "ok", f"Slot {slot} does not exist yet; the first snapshot creates it.")
    blocker = oldest_open_transaction(conn)
    if blocker is not None:
        yield Finding(
            "open_transaction",
            "warning",
            f"Creating the slot will wait for {blocker.describe()}.",
            blocker.remedy(),
        )


def _check_health(status: SlotStatus) -> Iterator[Finding]:
    if status.is_lost:
        why = f" ({status.invalidation_reason})" if status.invalidation_reason else ""
        yield Finding(
            "slot",
            "error",
            f"Replication slot {status.slot} is lost{why}: the server removed WAL that it needed.",
            "pgcdc renew: a new slot, and new copies of the tables in a new epoch.",
        )
        return
    if status.wal_status == "unreserved":
        yield Finding(
            "slot",
            "warning",
            f"Replication slot {status.slot} is unreserved: it keeps {status.retained_bytes} bytes "
            f"of WAL, "
            "more than max_slot_wal_keep_size, and is lost at the next checkpoint.",
            "Run the capture now, or raise max_slot_wal_keep_size.",
        )
    if status.active_pid is not None:
        ours = (status.active_application_name or "").startswith("pgcdc ")
        yield Finding(
            "slot",
            "warning" if ours else "error",
            f"Replication slot {status.slot} is in use by process {status.active_pid} "
            f"({status.active_application_name}).",
            f"Wait until it ends, or: select pg_terminate_backend({status.active_pid})",
        )
        return
    yield Finding("slot", "ok", f"Slot {status.slot} lags {status.lag_bytes} bytes.")
