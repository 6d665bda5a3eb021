"""Pre-flight check of the server: version, wal_level, privileges, slots and walsenders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.errors import UNKNOWN_CAPTURE, ConfigurationError, PgcdcError
from pgcdc_assets.postgres.blocking_transactions import oldest_blocking_transaction
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.errors import connection_failure
from pgcdc_assets.postgres.managed_services import (
    AZURE,
    MANAGED_BY_SQL,
    RDS,
    setting_remedy,
    wal_level_remedy,
)
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.postgres.slots.health import slot_health
from pgcdc_assets.postgres.slots.status import (
    SlotStatus,
    check_slot_usable,
    read_slot_status,
)
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_OLDEST_VERSION = 140000
_OLDEST_DECODING_STANDBY = 160000

# The first minor version of each major one in which the invalidations of a transaction also reach
# the transactions that run beside it. In an earlier one, pgoutput may keep its knowledge from
# before, and send nothing of the table until the stream starts again.
_FIRST_WITH_INVALIDATIONS = {14: 18, 15: 13, 16: 9, 17: 5}

_SERVER = f"""
select current_setting('server_version_num')::int, current_setting('server_version'),
       current_setting('wal_level'), pg_is_in_recovery(), current_user, current_database(),
       r.rolreplication or r.rolsuper or exists (
           select from pg_roles m where m.rolname in ('rds_replication', '{RDS}')
                                    and pg_has_role(current_user, m.oid, 'usage')),
       {MANAGED_BY_SQL},
       current_setting('max_replication_slots')::int,
       (select count(*) from pg_replication_slots)::int,
       (select string_agg(slot_name, ', ' order by slot_name)
          from pg_replication_slots where active_pid is null),
       current_setting('max_wal_senders')::int, (select count(*) from pg_stat_replication)::int,
       current_setting('wal_sender_timeout'),
       (select setting::bigint from pg_settings where name = 'max_slot_wal_keep_size'),
       (select setting::bigint from pg_settings where name = 'idle_replication_slot_timeout'),
       current_setting('hot_standby_feedback')::bool, current_setting('primary_slot_name')
  from pg_roles r where r.rolname = current_user
"""


@dataclass(frozen=True, slots=True)
class Server:
    """The server's settings and counts, read in one query.

    Attributes:
        version: server_version_num.
        may_replicate: the role has REPLICATION, is a superuser, or has a managed equivalent.
        managed_by: administrator role of a managed service; None on other servers.
        idle_slots: names of the slots without a walsender; None without such slots.
        max_slot_wal_keep_mb: max_slot_wal_keep_size in MB; below 0: unlimited.
        idle_slot_timeout: idle_replication_slot_timeout in seconds, PG 18 and newer; else None.
        has_standby_feedback: hot_standby_feedback; of a standby.
        primary_slot: primary_slot_name, the standby's slot on its primary; empty: without a slot.
    """

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
    has_standby_feedback: bool
    primary_slot: str


def read_server(conn: Connection) -> Server:
    """Read the server's settings and counts."""
    with conn.cursor() as cursor:
        cursor.execute(_SERVER)
        row = cursor.fetchone()
    assert row is not None
    return Server(*row)


def _check_minor(server: Server) -> Finding:
    """Return a finding about defects of a minor version in logical decoding."""
    major, minor = divmod(server.version, 10_000)
    first = _FIRST_WITH_INVALIDATIONS.get(major, 0)
    if minor >= first:
        return Finding("version", "ok", f"Postgres is {server.version_text}.")
    return Finding(
        "version",
        "warning",
        f"Postgres is {server.version_text}, which loses changes in logical decoding: those of a "
        "table that ALTER PUBLICATION adds, or whose enum type is altered, while a transaction "
        "writes to the table.",
        f"Update the server to Postgres {major}.{first} or newer.",
    )


def examine_server(server: Server) -> Iterator[Finding]:
    """Yield findings about version, recovery, wal_level and timeouts."""
    if server.version < _OLDEST_VERSION:
        yield Finding(
            "version",
            "error",
            f"Postgres is {server.version_text}.",
            "Use Postgres 14 or newer.",
        )
    else:
        yield _check_minor(server)
    if server.in_recovery and server.version < _OLDEST_DECODING_STANDBY:
        yield Finding(
            "standby",
            "error",
            "The server is a standby. Logical decoding on a standby requires Postgres 16.",
            "Connect to the primary.",
        )
    elif server.in_recovery:
        yield from _check_feedback(server)
    if server.wal_level != "logical":
        yield Finding(
            "wal_level",
            "error",
            f"wal_level is {server.wal_level}, but logical is required.",
            wal_level_remedy(server.managed_by),
        )
    else:
        yield Finding("wal_level", "ok", "wal_level is logical.")
    if server.wal_sender_timeout == "0":
        yield Finding(
            "wal_sender_timeout",
            "warning",
            "wal_sender_timeout is 0: the server does not detect a lost connection, and the "
            "walsender of a lost connection keeps the slot active.",
            setting_remedy(server.managed_by, "wal_sender_timeout", "'1min'"),
        )
    if server.max_slot_wal_keep_mb < 0:
        yield Finding(
            "max_slot_wal_keep_size",
            "warning",
            "max_slot_wal_keep_size is unlimited: the WAL of an inactive slot can fill the disk.",
            _limit_remedy(server),
        )
    if server.idle_slot_timeout:
        yield Finding(
            "idle_replication_slot_timeout",
            "warning",
            "idle_replication_slot_timeout is set: the slot is lost if no capture runs for this "
            "time.",
            setting_remedy(server.managed_by, "idle_replication_slot_timeout", "0"),
        )


def _limit_remedy(server: Server) -> str:
    if server.managed_by == AZURE:
        # A parameter that Azure shows and does not let change.
        return (
            "Azure does not let you change it: alert on the storage, and drop the slot of a "
            "capture that has ended."
        )
    remedy = setting_remedy(server.managed_by, "max_slot_wal_keep_size", "'100GB'")
    return (
        f"Set a limit that the disk allows, such as {remedy}. A slot above the limit is lost and "
        "requires a new snapshot."
    )


def _check_feedback(server: Server) -> Iterator[Finding]:
    """Yield findings about what keeps the catalog rows that a slot on a standby needs.

    Source: 47.2.2 Replication Slots, in the Postgres documentation.
    """
    if not server.has_standby_feedback:
        yield Finding(
            "hot_standby_feedback",
            "warning",
            "The server is a standby with hot_standby_feedback = off: its slot is lost as soon as "
            "VACUUM on the primary removes rows of the catalog that the slot needs, and a snapshot "
            "may lack rows.",
            f"on the standby: {setting_remedy(server.managed_by, 'hot_standby_feedback', 'on')}",
        )
    elif not server.primary_slot:
        yield Finding(
            "primary_slot_name",
            "warning",
            "The server is a standby without a slot on its primary (primary_slot_name): while the "
            "standby is disconnected, VACUUM on the primary may remove rows of the catalog that "
            "the capture's slot needs, and the slot is lost.",
            "on the primary: select pg_create_physical_replication_slot('standby', true); on the "
            "standby: " + setting_remedy(server.managed_by, "primary_slot_name", "'standby'"),
        )


def examine_replication(settings: ConnectionSettings, server: Server) -> Iterator[Finding]:
    """Yield findings about the REPLICATION privilege, pg_hba.conf and free walsenders.

    The check opens a replication connection.
    """
    if not server.may_replicate:
        remedy = f"alter role {quoted(server.role)} replication"
        if server.managed_by == RDS:
            remedy = f"grant rds_replication to {quoted(server.role)}"
        yield Finding("replication", "error", f"Role {server.role} lacks REPLICATION.", remedy)
        return
    try:
        psycopg2.connect(
            settings.conninfo_for("check", replication=True),
            connection_factory=LogicalReplicationConnection,
        ).close()
    except psycopg2.Error as error:
        failure: PgcdcError = connection_failure(settings.describe(), str(error), settings.variable)
        yield Finding("replication", "error", f"No replication connection: {failure}")
        return
    yield Finding("replication", "ok", f"Role {server.role} may replicate; a walsender is free.")


def examine_slot(
    conn: Connection, server: Server, slot: str, is_ours: bool = True, capture: str = ""
) -> Iterator[Finding]:
    """Yield findings about the slot, or about its creation if the slot does not exist.

    Args:
        conn: a connection to the source database.
        server: the server's settings.
        slot: the slot's name.
        is_ours: the lake was filled from the slot, or `--adopt-slot` was given.
        capture: the capture's name, for the remedy; empty: unknown.
    """
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
            f"Replication slot {slot} was read before, through {status.confirmed_flush_lsn}, but "
            "not into this lake: another lake or program may need the changes of the slot.",
            "Set PGCDC_LAKE to the lake that was filled from the slot, or give this capture a slot "
            "of its own (`slot`). If nothing else uses the slot: pgcdc sync --name "
            f"{capture or UNKNOWN_CAPTURE} --adopt-slot",
        )
    yield from _check_health(status, capture)


def _check_room(server: Server, *, needs_slot: bool, is_streaming: bool) -> Iterator[Finding]:
    """Yield findings about free slots and walsenders.

    A capture uses one slot and one walsender. `pgcdc verify` creates a second, temporary slot, and
    so does a snapshot with an existing slot whose LSN cannot be proved.

    Args:
        server: the server's settings.
        needs_slot: the capture's slot does not exist yet.
        is_streaming: a capture uses its walsender now.
    """
    free = server.max_slots - server.slot_count
    if free < 1 + needs_slot:
        idle = f" Inactive slots: {server.idle_slots}." if server.idle_slots else ""
        remedy = (
            "Drop an unused slot with select pg_drop_replication_slot('NAME'), or raise "
            f"max_replication_slots and restart the server.{idle}"
        )
        if free < 1:
            yield Finding(
                "slot",
                "error",
                f"No free replication slot: all {server.max_slots} of max_replication_slots are "
                "in use.",
                remedy,
            )
        else:
            yield Finding(
                "free_slots",
                "warning",
                "One replication slot is free, for the capture. New snapshots of tables and pgcdc "
                "verify need a second slot temporarily.",
                remedy,
            )
    free_walsenders = server.max_walsenders - server.walsender_count
    # Without a free walsender examine_replication has reported an error already.
    if 0 < free_walsenders < 2 - is_streaming:
        yield Finding(
            "walsenders",
            "warning",
            f"One walsender of {server.max_walsenders} (max_wal_senders) is free, for the capture. "
            "New snapshots of tables and pgcdc verify need a second walsender temporarily.",
            "Raise max_wal_senders and restart the server.",
        )


def _check_creation(conn: Connection, slot: str) -> Iterator[Finding]:
    yield Finding("slot", "ok", f"Slot {slot} does not exist yet; the first snapshot creates it.")
    blocker = oldest_blocking_transaction(conn)
    if blocker is not None:
        yield Finding(
            "open_transaction",
            "warning",
            f"The creation of the slot will wait for {blocker.describe()}.",
            blocker.remedy(),
        )


def _check_health(status: SlotStatus, capture: str) -> Iterator[Finding]:
    health = slot_health(status)
    error = health.error(status.slot, "", capture or UNKNOWN_CAPTURE)
    if error is not None:
        yield Finding("slot", "error", str(error))
        return
    if health.is_at_risk:
        yield Finding("slot", "warning", health.risk, health.risk_remedy)
    reader = status.active_application_name or ""
    # A run of the capture keeps its stream for minutes.
    if status.active_pid is not None and not reader.startswith("pgcdc capture"):
        yield Finding(
            "slot",
            "error",
            f"Replication slot {status.slot} is in use by process {status.active_pid} ({reader}).",
            f"Wait until it ends, or: select pg_terminate_backend({status.active_pid})",
        )
        return
    by = "" if status.active_pid is None else f" Process {status.active_pid} ({reader}) reads it."
    yield Finding("slot", "ok", f"Slot {status.slot} lags {status.lag_bytes} bytes.{by}")
