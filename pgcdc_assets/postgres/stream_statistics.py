"""What a server reports about a stream: its settings and sizes, and what it decoded for a slot.

Source: the view pg_stat_replication_slots. The sizes of tables are `relpages` of pg_class, which
VACUUM and ANALYZE update, so that the query reads no file, and waits for no lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.postgres.catalog.publication import published_sql
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.prepared_transactions import (
    OpenPreparedTransaction,
    read_prepared_transactions,
)
from pgcdc_assets.postgres.slots.status import SlotStatus, read_slot_status

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# Settings that explain the speed, the lag or the loss of a slot.
SETTINGS = (
    "wal_level",
    "logical_decoding_work_mem",
    "wal_sender_timeout",
    "max_slot_wal_keep_size",
    "idle_replication_slot_timeout",
    "max_wal_senders",
    "max_replication_slots",
    "synchronized_standby_slots",
)

_DECODED = """
select spill_txns, spill_count, spill_bytes, stream_txns, stream_count, stream_bytes,
       total_txns, total_bytes
  from pg_stat_replication_slots where slot_name = %s
"""

_FACTS = """
select current_setting('server_version'), pg_is_in_recovery(),
       array(select current_setting(name, true)
               from unnest(%(settings)s::text[]) with ordinality s (name, n) order by n),
       count(*),
       coalesce(sum(greatest(c.relpages, 0) + coalesce(p.pages, 0)), 0)::bigint
         * current_setting('block_size')::bigint
  from published t
  join pg_class c on c.oid = t.oid
  left join (
    select f.root, sum(greatest(l.relpages, 0)) as pages
      from tree f join pg_class l on l.oid = f.oid
     where f.oid <> f.root
     group by f.root) p on p.root = c.oid
"""


@dataclass(frozen=True, slots=True)
class DecodingStatistics:
    """A row of pg_stat_replication_slots: totals since the statistics were reset.

    Attributes:
        spill_txns: transactions that exceeded logical_decoding_work_mem and were spilled to disk.
        stream_txns: transactions that were sent before their commit.
        total_txns: transactions that were decoded, without subtransactions.
        total_bytes: bytes of changes that were decoded.
    """

    spill_txns: int
    spill_count: int
    spill_bytes: int
    stream_txns: int
    stream_count: int
    stream_bytes: int
    total_txns: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """The server and the publication at the start of a stream.

    Attributes:
        server_version: such as `18.4`.
        settings: the server's values of `SETTINGS`; a setting that the version lacks is absent.
        table_count: tables of the publication.
        table_bytes: size of these tables without indexes and TOAST, as of the last VACUUM or
            ANALYZE of each.
        retained_bytes: WAL that the server keeps for the slot; None without a slot.
        prepared: the prepared transactions of the database, oldest first.
    """

    server_version: str
    in_recovery: bool
    settings: Mapping[str, str]
    table_count: int
    table_bytes: int
    retained_bytes: int | None
    prepared: Sequence[OpenPreparedTransaction] = ()


def read_source_facts(conn: Connection, slot: str, publication: str) -> SourceFacts | None:
    """Return the facts; None if the query fails, because a capture does not need the facts."""
    with contextlib.suppress(psycopg2.Error):
        with conn.cursor() as cursor:
            cursor.execute(
                published_sql(conn) + _FACTS,
                {"settings": list(SETTINGS), "publication": publication},
            )
            ((version, in_recovery, values, table_count, table_bytes),) = cursor.fetchall()
        status = read_slot_status(conn, slot)
        known = zip(SETTINGS, values, strict=True)
        return SourceFacts(
            server_version=version.split(" ")[0],
            in_recovery=in_recovery,
            settings={name: value for name, value in known if value is not None},
            table_count=table_count,
            table_bytes=table_bytes,
            retained_bytes=None if status is None else status.retained_bytes,
            prepared=read_prepared_transactions(conn),
        )
    return None


def read_slot_progress(
    settings: ConnectionSettings, slot: str
) -> tuple[SlotStatus, DecodingStatistics | None] | None:
    """Return the slot's status and its statistics; None if the server cannot be asked now."""
    with contextlib.suppress(PgcdcError, psycopg2.Error):
        with query_connection(settings, "report") as conn:
            status = read_slot_status(conn, slot)
            return None if status is None else (status, read_decoding_statistics(conn, slot))
    return None


def read_decoding_statistics(conn: Connection, slot: str) -> DecodingStatistics | None:
    """Return the slot's statistics; None before the first decoded transaction."""
    with conn.cursor() as cursor:
        cursor.execute(_DECODED, (slot,))
        row = cursor.fetchone()
    return None if row is None else DecodingStatistics(*row)
