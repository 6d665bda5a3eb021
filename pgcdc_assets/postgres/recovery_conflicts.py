"""Conflicts with recovery: a standby ends what is in the way of the WAL that it replays.

A running statement ends with an error, an idle transaction with its session. libpq does not keep
the SQLSTATE of a session that ended while the session was idle: the standby's counters tell such a
conflict from a lost connection.

Sources: 26.4.2 Handling Query Conflicts; ProcessInterrupts in src/backend/tcop/postgres.c.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg2

from pgcdc_assets.errors import PgcdcError, SnapshotEnded
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# serialization_failure: locks, snapshots and tablespaces. deadlock_detected: with the replay.
# database_dropped. On a standby, a transaction that only reads has no other cause for these.
CONFLICTS = frozenset({"40001", "40P01", "57P04"})

_COLLECTOR_SECONDS = 2.0

_COUNT = """
select confl_tablespace + confl_lock + confl_snapshot + confl_bufferpin + confl_deadlock
  from pg_stat_database_conflicts where datname = current_database()
"""


def is_hot_standby(conn: Connection) -> bool:
    """Return whether the server replays WAL; reported since Postgres 14, also after a promotion."""
    return conn.get_parameter_status("in_hot_standby") == "on"


def count_conflicts(conn: Connection) -> int:
    """Return the number of sessions of this database that conflicts with recovery have ended."""
    with conn.cursor() as cursor:
        cursor.execute(_COUNT)
        row = cursor.fetchone()
    return 0 if row is None else int(row[0])


def has_more_conflicts(settings: ConnectionSettings, count: int) -> bool:
    """Return whether a standby counts more conflicts than before; False if it is not available."""
    with contextlib.suppress(PgcdcError, psycopg2.Error):
        with query_connection(settings, "check") as conn:
            # Before 15, a collector publishes the counters every 0.5 s (PGSTAT_STAT_INTERVAL).
            patience = _COLLECTOR_SECONDS if conn.server_version < 150000 else 0.0
            deadline = time.monotonic() + patience
            while not (has_more := count_conflicts(conn) > count) and time.monotonic() < deadline:
                time.sleep(0.1)
            return has_more
    return False


@contextlib.contextmanager
def sorted_conflicts(standby: ConnectionSettings, doing: str) -> Iterator[None]:
    """Convert an error of a conflict with recovery inside the block to a SnapshotEnded."""
    try:
        yield
    except psycopg2.Error as error:
        if error.pgcode not in CONFLICTS:
            raise
        raise conflict_error(standby.describe(), doing) from error


def conflict_error(server: str, doing: str) -> SnapshotEnded:
    """Return the error of a snapshot that a conflict with recovery has ended.

    Args:
        server: `ConnectionSettings.describe()` of the standby.
        doing: what was ended, for the sentence.
    """
    return SnapshotEnded(
        reason=f"{server} ended {doing}, because the replay of WAL was in conflict with it. Run it "
        "again; if it happens often, set hot_standby_feedback = on on the standby, or raise its "
        "max_standby_streaming_delay."
    )
