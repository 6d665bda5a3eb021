"""Pre-flight check of the options of slot and stream that need a later version of Postgres."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pgcdc_assets.error_text import first_names
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.catalog.publication import published_sql
from pgcdc_assets.postgres.managed_services import MANAGED_BY_SQL, setting_remedy
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.postgres.slots.creation import check_failover
from pgcdc_assets.postgres.stream.plugin_options import (
    ORIGIN_VERSION,
    STREAMING_VERSIONS,
    Streaming,
)
from pgcdc_assets.settings.policies import SlotPolicy, StreamPolicy
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_STANDBY_SLOTS = f"""
select coalesce(setting, ''), pg_is_in_recovery(),
       array(select name
               from (select trim(both ' "' from name)
                       from unnest(string_to_array(setting, ',')) name) listed(name)
              where not exists (select from pg_replication_slots s
                                 where s.slot_name = name and s.active)),
       {MANAGED_BY_SQL}
  from current_setting('synchronized_standby_slots', true) setting
"""

# A subscription may name the partitions of a published table, or the table.
_SUBSCRIBED = """
select n.nspname, c.relname
  from published p
  join pg_class c on c.oid = p.oid
  join pg_namespace n on n.oid = c.relnamespace
 where exists (select from pg_subscription_rel s
                where s.srrelid = p.oid
                   or s.srrelid in (select t.oid from tree t where t.root = p.oid))
 order by 1, 2
"""

# Number of tables that a sentence names.
_NAMED = 3


def examine_options(conn: Connection, slot: SlotPolicy, stream: StreamPolicy) -> Iterator[Finding]:
    """Yield a finding per option that the server does not have, or that lacks a companion."""
    version = conn.server_version // 10000
    _, first = STREAMING_VERSIONS[Streaming(stream.streaming)]
    if version < first:
        yield _missing("streaming", f"stream.streaming: {stream.streaming}", first, version)
    if stream.origin != "any" and version < ORIGIN_VERSION:
        yield _missing("origin", f"stream.origin: {stream.origin}", ORIGIN_VERSION, version)
    if not slot.failover:
        return
    with conn.cursor() as cursor:
        cursor.execute(_STANDBY_SLOTS)
        ((standby_slots, in_recovery, absent, managed_by),) = cursor.fetchall()
    try:
        check_failover(conn.server_version, in_recovery)
    except ConfigurationError as error:
        yield Finding("failover", "error", str(error))
        return
    if not standby_slots:
        yield Finding(
            "failover",
            "warning",
            "synchronized_standby_slots is empty: a capture may read changes that the standby has "
            "not received, and stops after a failover that lost such changes.",
            setting_remedy(managed_by, "synchronized_standby_slots", "'SLOT OF THE STANDBY'"),
        )
    elif absent:
        yield Finding(
            "failover",
            "warning",
            f"synchronized_standby_slots names {', '.join(absent)}, which no standby uses now: the "
            "server sends nothing of a slot with failover until each standby has the WAL.",
            "Start the standby, or take its slot out of this setting.",
        )


def examine_subscribed_tables(
    conn: Connection, publication: str, stream: StreamPolicy
) -> Iterator[Finding]:
    """Yield a warning if `stream.origin: none` leaves out what fills a table of the publication."""
    if stream.origin != "none":
        return
    with conn.cursor() as cursor:
        cursor.execute(published_sql(conn) + _SUBSCRIBED, {"publication": publication})
        names = [str(TableName(*row)) for row in cursor]
    if names:
        yield Finding(
            "origin",
            "warning",
            f"A subscription replicates into {first_names(names, _NAMED)}, and `stream.origin: "
            "none` leaves out what it writes: snapshots have these rows, and their later changes "
            "never arrive.",
            "Remove the setting, or take the tables out of the publication.",
        )


def _missing(code: str, setting: str, first: int, version: int) -> Finding:
    return Finding(
        code,
        "error",
        f"The setting `{setting}` requires Postgres {first}, and the server has version {version}.",
        f"Remove the setting, or capture from Postgres {first} or newer.",
    )
