"""The check of the primary that helps the creation of slots on a standby."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.postgres.slots.status import read_server_identity, read_slot_status
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_CODE = "primary"
_OLDEST_VERSION = 160000
_PRIVILEGE = """
select pg_catalog.has_function_privilege('pg_catalog.pg_log_standby_snapshot()', 'execute')
"""


def examine_slot_primary(
    conn: Connection, settings: ConnectionSettings, slot: str
) -> Iterator[Finding]:
    """Yield findings about the primary of a source on a standby.

    Args:
        conn: a connection to the source database.
        settings: the source database; `settings.primary` is its primary.
        slot: the slot's name.
    """
    source, primary = read_server_identity(conn), settings.primary
    if primary is None:
        has_slot = read_slot_status(conn, slot) is not None
        if source.in_recovery and source.server_version >= _OLDEST_VERSION and not has_slot:
            yield Finding(
                _CODE,
                "warning",
                "The server is a standby: the creation of a slot waits for a record of the running "
                "transactions of the primary, which an idle primary does not write.",
                "Set primary_dsn_env to the environment variable with the primary's libpq URI.",
            )
        return
    name = f"primary_dsn_env names {primary.describe()} ({primary.variable}), which"
    remedy = f"Name the primary of {settings.describe()}, or remove primary_dsn_env."
    try:
        with query_connection(primary, "check") as other, other.cursor() as cursor:
            found = read_server_identity(other)
            if found.in_recovery:
                yield Finding(_CODE, "error", f"{name} is a standby.", remedy)
                return
            if found.system_identifier != source.system_identifier:
                yield Finding(_CODE, "error", f"{name} is another cluster.", remedy)
                return
            if found.server_version < _OLDEST_VERSION:
                # A finding of the standby says that it cannot decode.
                return
            cursor.execute(_PRIVILEGE)
            ((may_execute,),) = cursor.fetchall()
    except (ConfigurationError, TransientError) as error:
        yield Finding(_CODE, "error", str(error))
        return
    if not may_execute:
        role = quoted(primary.role)
        yield Finding(
            _CODE,
            "error",
            f"{name} does not let the role execute pg_log_standby_snapshot().",
            f"on the primary: grant execute on function pg_log_standby_snapshot() to {role}",
        )
        return
    if not source.in_recovery:
        yield Finding(
            _CODE,
            "warning",
            "primary_dsn_env has no effect: the source is not a standby.",
            "Remove primary_dsn_env.",
        )
        return
    yield Finding(_CODE, "ok", f"{name} helps the creation of slots on the standby.")
