"""Pre-flight check of the heartbeats that a capture writes to its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pgcdc_assets.postgres.heartbeat import COLUMNS, read_heartbeat_table, table_remedy
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.settings.policies import HeartbeatPolicy

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_CODE = "heartbeat"


def examine_heartbeat(
    conn: Connection, policy: HeartbeatPolicy | None, publication: str, *, in_recovery: bool
) -> Iterator[Finding]:
    """Yield a finding about the heartbeats, if the settings ask for them.

    Args:
        conn: a connection to the source database.
        policy: the setting `heartbeat`.
        publication: the publication's name.
        in_recovery: the server is a standby.
    """
    if policy is None:
        return
    if in_recovery:
        yield Finding(
            _CODE,
            "warning",
            "The server is a standby, to which no heartbeat can be written.",
            "Remove the setting `heartbeat`.",
        )
        return
    table = policy.table_name
    if table is None:
        yield Finding(_CODE, "ok", "Heartbeats are logical messages, which need no privilege.")
        return
    found = read_heartbeat_table(conn, table, publication)
    missing = sorted(COLUMNS - found.columns)
    remedy = f"{table_remedy(table)}."
    if not found.exists:
        yield Finding(_CODE, "warning", f"Heartbeat table {table} does not exist.", remedy)
    elif missing:
        sentence = f"Heartbeat table {table} lacks the columns {', '.join(missing)}."
        yield Finding(_CODE, "warning", sentence, f"Drop the table. {remedy}")
    elif not found.is_writable:
        sentence = f"The role may not write heartbeat table {table}."
        yield Finding(_CODE, "warning", sentence, remedy)
    elif found.is_published:
        yield Finding(
            _CODE,
            "warning",
            f"Publication {publication} sends heartbeat table {table}: each heartbeat is a "
            "change, which opens a window.",
            "Use a table outside the publication, or no `table`: a logical message.",
        )
    else:
        yield Finding(_CODE, "ok", f"Heartbeats are written to table {table}.")
