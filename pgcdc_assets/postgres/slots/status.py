"""Replication slots: status, suitability and drop.

`read_slot_status` is one statement, on every supported version and on a standby. Columns of newer
versions are read through `to_jsonb`, which yields NULL for a missing column. Source: view
pg_replication_slots, Postgres documentation, chapter 52 System Views.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg2.errors import ObjectInUse

from pgcdc_assets.errors import ConfigurationError, SlotBusy, SlotTaken
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.slots.creation import (
    ExportedSnapshot,
    create_slot,
)
from pgcdc_assets.postgres.wal.positions import (
    CURRENT_LSN_SQL,
    PRIMARY_TIMELINE_SQL,
    read_current_lsn,
)

if TYPE_CHECKING:
    from datetime import datetime

    from psycopg2.extensions import connection as Connection

__all__ = [
    "ExportedSnapshot",
    "ServerIdentity",
    "SlotStatus",
    "SlotWalStatus",
    "check_slot_usable",
    "create_slot",
    "drop_slot",
    "read_current_lsn",
    "read_server_identity",
    "read_slot_status",
    "slot_taken_error",
]

# Size of a running-transactions record (xl_running_xacts) with a few hundred transactions.
_NEW_BYTES = 1024

# The server lists the slots and the processes one after the other: a walsender that ends or begins
# in between holds the slot and has no row in pg_stat_activity. Another read agrees with itself.
_STATUS_READS = 3

# PG 16 calls each lost slot conflicting (pg_get_replication_slots in src/backend/replication/
# slotfuncs.c). Only the loss of WAL removes restart_lsn (InvalidatePossiblyObsoleteSlot in slot.c).
_STATUS = f"""
select s.slot_name, s.plugin, s.slot_type, s.database, s.temporary, s.active_pid,
       coalesce(a.application_name, 'another role'),
       s.restart_lsn::text, s.confirmed_flush_lsn::text, s.wal_status, s.safe_wal_size,
       coalesce(
         to_jsonb(s) ->> 'invalidation_reason',
         case when to_jsonb(s) ->> 'conflicting' = 'true' and s.restart_lsn is not null
              then 'rows_removed' end
       ),
       (to_jsonb(s) ->> 'inactive_since')::timestamptz,
       age(s.catalog_xmin),
       c.current_lsn::text, c.in_recovery, clock_timestamp(),
       extract(epoch from r.flush_lag)::float8,
       s.two_phase and current_setting('server_version_num')::int >= 150000,
       coalesce((to_jsonb(s) ->> 'synced')::bool, false),
       coalesce((to_jsonb(s) ->> 'failover')::bool, false),
       d.total_txns, d.stats_reset is not null,
       w.stats_reset > pg_postmaster_start_time(),
       s.active_pid is null or a.pid is not null
  from (select {CURRENT_LSN_SQL} as current_lsn, pg_is_in_recovery() as in_recovery) c,
       pg_stat_bgwriter w, pg_replication_slots s
  left join pg_stat_replication_slots d on d.slot_name = s.slot_name
  left join pg_stat_activity a on a.pid = s.active_pid
  left join pg_stat_replication r on r.pid = s.active_pid
 where s.slot_name = %s
"""

_IDENTITY = f"""
select s.system_identifier::text,
       coalesce({PRIMARY_TIMELINE_SQL}, p.timeline_id),
       current_database(), current_setting('server_version_num')::int, pg_is_in_recovery()
  from pg_control_system() s, pg_control_checkpoint() p
"""


class SlotWalStatus(enum.StrEnum):
    """`wal_status` of pg_replication_slots: whether the server keeps the WAL that a slot needs."""

    RESERVED = "reserved"
    EXTENDED = "extended"
    UNRESERVED = "unreserved"
    LOST = "lost"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, text: str | None) -> SlotWalStatus:
        """Read the server's word; a word of a later version, or none, is unknown."""
        known = {str(status): status for status in cls}
        return known.get(text or "", cls.UNKNOWN)


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One row of pg_replication_slots with the server's position, read in one statement.

    Attributes:
        active_pid: the walsender that reads the slot now; None for an inactive slot.
        active_application_name: application_name of this walsender; `another role` if the
            connection may not see the name, or pg_stat_activity has no row of the walsender.
        restart_lsn: oldest WAL the slot keeps.
        confirmed_flush_lsn: where decoding resumes.
        safe_wal_size: WAL bytes that the server can write before the slot may be lost; None
            without a limit.
        invalidation_reason: cause of a lost slot, PG 17 and newer. In PG 16, `rows_removed` for
            each conflict with recovery, also for a lowered wal_level.
        two_phase: the server sends transactions as soon as they are prepared. False in PG 14,
            whose pgoutput ignores the slot's `two_phase`.
        is_synced: a standby's copy of a slot of the primary, PG 17 and newer.
        has_failover: standbys may keep a copy of the slot, PG 17 and newer.
        decoded_transactions: `total_txns` of pg_stat_replication_slots.
        is_counted_since_creation: `decoded_transactions` was not reset by a function. A crash
            resets the count without a trace.
        may_have_crashed: the cumulative statistics began after the server's start, as after a
            crash and in a new cluster.
        inactive_since: time of the last release of the slot, PG 17 and newer.
        catalog_xmin_age: number of transactions since `catalog_xmin`.
        current_lsn: flushed WAL of a primary, replayed WAL of a standby.
        server_time: the server's clock, to compare with commit timestamps.
        lag_bytes: from confirmed_flush_lsn to current_lsn.
        retained_bytes: from restart_lsn to current_lsn.
        lag_seconds: 0 without lag; the walsender's flush lag while a walsender is attached; else
            None, because Postgres does not record the time of an LSN.
    """

    slot: str
    plugin: str | None
    slot_type: str
    database: str | None
    temporary: bool
    active_pid: int | None
    active_application_name: str | None
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    wal_status: SlotWalStatus
    safe_wal_size: int | None
    invalidation_reason: str | None
    inactive_since: datetime | None
    catalog_xmin_age: int | None
    current_lsn: Lsn
    in_recovery: bool
    server_time: datetime
    lag_seconds: float | None
    two_phase: bool
    is_synced: bool
    has_failover: bool
    decoded_transactions: int | None
    is_counted_since_creation: bool
    may_have_crashed: bool

    @property
    def was_read(self) -> bool:
        """Whether a reader has, or may have, decoded changes of the slot since its creation.

        Postgres records neither the creation of a slot nor its readers. The count of decoded
        transactions shows a reader, but a crash resets the count. After a crash, the distance of
        `confirmed_flush_lsn` from `restart_lsn` decides: a new slot's distance is one
        running-transactions record, unless the creation waited for open transactions.
        """
        if self.decoded_transactions or not self.is_counted_since_creation:
            return True
        if not self.may_have_crashed or self.in_recovery:
            return False
        restart, confirmed = self.restart_lsn, self.confirmed_flush_lsn
        return restart is None or confirmed is None or confirmed - restart > _NEW_BYTES

    @property
    def lag_bytes(self) -> int | None:
        """Bytes of WAL that the slot's reader has not confirmed yet."""
        return _distance(self.confirmed_flush_lsn, self.current_lsn)

    @property
    def retained_bytes(self) -> int | None:
        """Bytes of WAL that the server keeps for the slot."""
        return _distance(self.restart_lsn, self.current_lsn)

    @property
    def is_active(self) -> bool:
        """Whether a walsender reads the slot now."""
        return self.active_pid is not None

    @property
    def is_lost(self) -> bool:
        """Whether the server has invalidated the slot."""
        return self.wal_status is SlotWalStatus.LOST or self.invalidation_reason is not None


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """The cluster, timeline and database of a connection.

    Attributes:
        system_identifier: of pg_control_system(); a cluster keeps the identifier for life.
        timeline: the timeline that a primary writes, or of a standby's last checkpoint.
        server_version: `server_version_num`, such as 180004.
    """

    system_identifier: str
    timeline: int
    database: str
    server_version: int
    in_recovery: bool


def read_slot_status(conn: Connection, slot: str) -> SlotStatus | None:
    """Return a slot's status, read in one statement; None if the slot does not exist."""
    with conn.cursor() as cursor:
        for _ in range(_STATUS_READS):
            cursor.execute(_STATUS, (slot,))
            row = cursor.fetchone()
            if row is None or row[-1]:
                break
    if row is None:
        return None
    confirmed, current = _lsn(row[8]), Lsn.parse(row[14])
    caught_up = confirmed is not None and confirmed >= current
    return SlotStatus(
        slot=row[0],
        plugin=row[1],
        slot_type=row[2],
        database=row[3],
        temporary=row[4],
        active_pid=row[5],
        active_application_name=row[6] if row[5] is not None else None,
        restart_lsn=_lsn(row[7]),
        confirmed_flush_lsn=confirmed,
        wal_status=SlotWalStatus.of(row[9]),
        safe_wal_size=row[10],
        invalidation_reason=row[11],
        inactive_since=row[12],
        catalog_xmin_age=row[13],
        current_lsn=current,
        in_recovery=row[15],
        server_time=row[16],
        lag_seconds=0.0 if caught_up else row[17],
        two_phase=row[18],
        is_synced=row[19],
        has_failover=row[20],
        decoded_transactions=row[21],
        is_counted_since_creation=not row[22],
        may_have_crashed=bool(row[23]),
    )


def read_server_identity(conn: Connection) -> ServerIdentity:
    """Return the cluster's identifier, timeline and version, and the database's name."""
    with conn.cursor() as cursor:
        cursor.execute(_IDENTITY)
        row = cursor.fetchone()
    assert row is not None
    return ServerIdentity(*row)


def check_slot_usable(status: SlotStatus, database: str) -> None:
    """Raise an error for a slot that a capture of `database` cannot use.

    Raises:
        ConfigurationError: the slot is physical, belongs to another plugin or database, is
            temporary, or is a standby's copy.
    """
    drop = f"select pg_drop_replication_slot('{status.slot}')"
    if status.is_synced and status.in_recovery:
        raise ConfigurationError(
            reason=f"Replication slot {status.slot} is this standby's copy of a slot of the "
            "primary, which Postgres does not decode here. Connect to the primary, or promote the "
            "standby."
        )
    if status.slot_type != "logical":
        found = "is a physical slot"
    elif status.plugin != "pgoutput":
        found = f"belongs to the output plugin {status.plugin}"
    elif status.database != database:
        found = f"belongs to database {status.database}"
    elif status.temporary:
        found = "is the temporary slot of another session"
    else:
        return
    raise ConfigurationError(
        reason=f"Replication slot {status.slot} {found}; a permanent logical slot of plugin "
        f"pgoutput in database {database} is needed. Choose another slot name, or drop this slot "
        f"if no other program uses it: {drop}"
    )


def slot_taken_error(
    status: SlotStatus, lake: str, remedy: str, reader: str = "another lake or program"
) -> SlotTaken:
    """Return the error for a slot that another reader has used.

    Args:
        status: the slot.
        lake: the lake that was not filled from the slot.
        remedy: the command that adopts the slot.
        reader: the other reader.
    """
    return SlotTaken(
        slot=status.slot,
        confirmed_flush_lsn=status.confirmed_flush_lsn,
        restart_lsn=status.restart_lsn,
        lake=lake,
        remedy=remedy,
        reader=reader,
    )


def drop_slot(conn: Connection, slot: str) -> bool:
    """Drop a slot. Return False if the slot does not exist.

    Raises:
        SlotBusy: a walsender reads the slot.
    """
    status = read_slot_status(conn, slot)
    if status is None:
        return False
    try:
        with conn.cursor() as cursor:
            cursor.execute("select pg_drop_replication_slot(%s)", (slot,))
    except ObjectInUse as error:
        raise SlotBusy(
            slot=slot,
            active_pid=status.active_pid,
            application_name=status.active_application_name,
        ) from error
    return True


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def _distance(start: Lsn | None, end: Lsn) -> int | None:
    return None if start is None else max(0, int(end) - int(start))
