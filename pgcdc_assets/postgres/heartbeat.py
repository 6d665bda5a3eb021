"""Heartbeats of a capture in its source: a logical message, or a row of a table.

A row names the owner of the slot, so that another lake sees the owner before it reads the slot. A
number in the row rises with each heartbeat. A server that has an earlier number than the raw zone
was restored to a time before the captured changes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2

from pgcdc_assets.errors import ConfigurationError, PgcdcError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.publication import published_sql
from pgcdc_assets.postgres.wal.positions import CURRENT_LSN_SQL
from pgcdc_assets.table_name import TableName, quoted

if TYPE_CHECKING:
    import datetime as dt

    from psycopg2.extensions import connection as Connection

# `xid` is the transaction that wrote the row. A row that was loaded from a dump, or edited, has
# another `xmin`, so its number proves nothing.
_READ = """
select tableoid::bigint, capture, lake, lake_id, epoch, heartbeat, written_at,
       xmin::text::bigint = (xid::text::numeric %% 4294967296)
  from {table} where slot = %s
"""

_TABLE_ID = """
select c.oid::bigint
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where (n.nspname, c.relname) = (%s, %s)
"""

# For the table pgcdc.heartbeats: insert into "pgcdc"."heartbeats" as h (slot, ...) values (...) on
# conflict (slot) do update set capture = excluded.capture, ... where h.lake_id = excluded.lake_id
_WRITE = """
insert into {table} as h (slot, capture, lake, lake_id, epoch, captured_through, heartbeat,
                          xid, written_at)
values (%(slot)s, %(capture)s, %(lake)s, %(lake_id)s, %(epoch)s, %(captured_through)s,
        %(floor)s::bigint + 1, pg_current_xact_id(), clock_timestamp())
on conflict (slot) do update
   set capture = excluded.capture, lake = excluded.lake, lake_id = excluded.lake_id,
       epoch = excluded.epoch, captured_through = excluded.captured_through,
       heartbeat = greatest(h.heartbeat + 1, excluded.heartbeat), xid = excluded.xid,
       written_at = excluded.written_at
 where %(takes_over)s or (h.capture, h.lake_id) = (excluded.capture, excluded.lake_id)
returning tableoid::bigint, heartbeat
"""

# Without a wait for standbys; a lock of a schema change must not delay the capture.
_BEGIN = (
    "begin read write; set local synchronous_commit = local; "
    "set local lock_timeout = '2s'; set local statement_timeout = '5s'"
)

_TABLE = """
create table {table} (
    slot name primary key, capture text not null, lake text not null, lake_id text not null,
    epoch int not null, captured_through pg_lsn not null, heartbeat bigint not null,
    xid xid8 not null, written_at timestamptz not null) with (fillfactor = 50)
"""

_WRITABLE = """
select c.oid is not null,
       c.oid is not null and has_schema_privilege(c.relnamespace, 'usage')
           and has_table_privilege(c.oid, 'select') and has_table_privilege(c.oid, 'insert')
           and has_table_privilege(c.oid, 'update'),
       coalesce((select array_agg(a.attname::text) from pg_attribute a
                  where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped), '{}'),
       exists (select from published p where p.oid = c.oid)
  from (select 1) one
  left join (pg_class c join pg_namespace n on n.oid = c.relnamespace)
    on n.nspname = %(schema)s and c.relname = %(table)s
"""

COLUMNS = frozenset(
    {
        *("slot", "capture", "lake", "lake_id", "epoch", "captured_through"),
        *("heartbeat", "xid", "written_at"),
    }
)


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """The lake that is filled from a slot.

    Attributes:
        slot: the slot's name.
        capture: the capture's name.
        lake: path or URI of the capture in the lake.
        lake_id: identifier of the capture's tables; a copy of a lake has the same identifier.
        epoch: number of the epoch.
    """

    slot: str
    capture: str
    lake: str
    lake_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat that was written.

    Attributes:
        table_id: OID of the table.
        number: the number of the heartbeat.
        flushed: a flushed position behind the heartbeat's commit.
    """

    table_id: int
    number: int
    flushed: Lsn


@dataclass(frozen=True, slots=True)
class HeartbeatRow:
    """The newest heartbeat in a table.

    Attributes:
        table_id: OID of the table.
        owner: the writer of the heartbeat.
        number: the number of the heartbeat.
        written_at: time of the heartbeat, by the server's clock.
        is_original: the row is as its writer wrote the row, so `number` is comparable.
    """

    table_id: int
    owner: SlotOwner
    number: int
    written_at: dt.datetime
    is_original: bool


@dataclass(frozen=True, slots=True)
class HeartbeatTable:
    """What the catalog says about a heartbeat table.

    Attributes:
        exists: the table exists.
        is_writable: the role may read, insert and update rows.
        columns: names of the table's columns.
        is_published: the publication sends the table.
    """

    exists: bool
    is_writable: bool
    columns: frozenset[str]
    is_published: bool


def create_table_sql(table: TableName) -> str:
    """Return the CREATE TABLE statement of a heartbeat table."""
    return " ".join(_TABLE.format(table=quoted(*table)).split())


def read_heartbeat(conn: Connection, table: TableName, slot: str) -> HeartbeatRow | None:
    """Return the newest heartbeat of a slot; None without a row or a readable table."""
    with contextlib.suppress(psycopg2.ProgrammingError):
        with conn.cursor() as cursor:
            cursor.execute(_statement(_READ, table), (slot,))
            row = cursor.fetchone()
        if row is not None:
            table_id, capture, lake, lake_id, epoch, number, written_at, is_original = row
            owner = SlotOwner(slot, capture, lake, lake_id, epoch)
            return HeartbeatRow(table_id, owner, number, written_at, is_original)
    return None


def find_table_id(conn: Connection, table: TableName) -> int | None:
    """Return the OID of a heartbeat table; None if the table does not exist."""
    with conn.cursor() as cursor:
        cursor.execute(_TABLE_ID, (table.schema, table.table))
        row = cursor.fetchone()
    return None if row is None else int(row[0])


def write_heartbeat(
    conn: Connection,
    table: TableName,
    owner: SlotOwner,
    captured_through: Lsn,
    floor: int = 0,
    *,
    takes_over: bool = False,
) -> Heartbeat | None:
    """Write a heartbeat, and return it; None if another lake owns the slot.

    Args:
        conn: a connection to the source database, a primary.
        table: the heartbeat table.
        owner: the writer.
        captured_through: end of the captured WAL.
        floor: the new number is above this number.
        takes_over: replace the row of another lake.

    Raises:
        ConfigurationError: the table does not exist, has other columns, or may not be written.
        TransientError: the row is locked.
        psycopg2.Error: the connection was lost.
    """
    values = {
        "slot": owner.slot,
        "capture": owner.capture,
        "lake": owner.lake,
        "lake_id": owner.lake_id,
        "epoch": owner.epoch,
        "captured_through": str(captured_through),
        "floor": floor,
        "takes_over": takes_over,
    }
    with conn.cursor() as cursor:
        try:
            cursor.execute(_BEGIN)
            cursor.execute(_statement(_WRITE, table), values)
            row = cursor.fetchone()
            cursor.execute("commit")
        except psycopg2.Error as error:
            if conn.closed:
                raise
            with contextlib.suppress(psycopg2.Error):
                cursor.execute("rollback")
            raise _failure(table, error) from error
        if row is None:
            return None
        cursor.execute(f"select ({CURRENT_LSN_SQL})::text")
        ((flushed,),) = cursor.fetchall()
    table_id, number = row
    return Heartbeat(table_id, number, Lsn.parse(flushed))


def _statement(template: str, table: TableName) -> str:
    # The driver replaces a doubled percent sign in a name.
    return template.format(table=quoted(*table).replace("%", "%%"))


def _failure(table: TableName, error: psycopg2.Error) -> PgcdcError:
    what = f"No heartbeat was written to table {table}: {error.diag.message_primary or error}."
    if isinstance(error, psycopg2.OperationalError):
        return TransientError(reason=what)
    return ConfigurationError(reason=f"{what} {table_remedy(table)}")


def table_remedy(table: TableName) -> str:
    """Return the statements that make a heartbeat table writable."""
    return (
        f"Create the table with: {create_table_sql(table)}; and grant select, insert, update on "
        f"{quoted(*table)}, and usage on schema {quoted(table.schema)}, to the role"
    )


def read_heartbeat_table(conn: Connection, table: TableName, publication: str) -> HeartbeatTable:
    """Read what the catalog says about a heartbeat table."""
    with conn.cursor() as cursor:
        names = {"schema": table.schema, "table": table.table, "publication": publication}
        cursor.execute(published_sql(conn) + _WRITABLE, names)
        ((exists, is_writable, columns, is_published),) = cursor.fetchall()
    return HeartbeatTable(exists, is_writable, frozenset(columns), is_published)
