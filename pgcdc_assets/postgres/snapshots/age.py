"""The age of a snapshot that a session holds, in transactions and seconds.

VACUUM removes no row version that a held snapshot may see, in any table of the database. Postgres
warns when the oldest snapshot is `autovacuum_freeze_max_age` transactions old: "cutoff for removing
and freezing tuples is far in the past" (vacuum_get_cutoffs in src/backend/commands/vacuum.c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.postgres.connection import ConnectionSettings

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_HELD = """
select max(age(backend_xmin)), extract(epoch from max(clock_timestamp() - xact_start))::float8
  from pg_stat_activity
 where application_name = any(%s) and backend_xmin is not null and pid <> pg_backend_pid()
"""


@dataclass(frozen=True, slots=True)
class SnapshotAge:
    """The age of a held snapshot.

    Attributes:
        transactions: transaction ids that were assigned since its xmin.
        seconds: time since its transaction began.
    """

    transactions: int
    seconds: float


def read_xmin_age(conn: Connection, xmin: int) -> int:
    """Return how many transaction ids were assigned and completed since a 64-bit `xmin`."""
    with conn.cursor() as cursor:
        cursor.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint - %s", (xmin,))
        row = cursor.fetchone()
    assert row is not None
    return max(0, int(row[0]))


def read_warning_age(conn: Connection) -> int:
    """Return the age in transactions at which VACUUM warns of an old snapshot."""
    with conn.cursor() as cursor:
        cursor.execute("select current_setting('autovacuum_freeze_max_age')::bigint")
        row = cursor.fetchone()
    assert row is not None
    return int(row[0])


def read_held_snapshot(conn: Connection, settings: ConnectionSettings) -> SnapshotAge | None:
    """Return the age of the oldest snapshot that the copies of a capture hold; None without one.

    The sessions must be of this role, or this role a member of pg_read_all_stats.
    """
    names = [settings.application_name(purpose) for purpose in ("snapshot", "copy")]
    with conn.cursor() as cursor:
        cursor.execute(_HELD, (names,))
        row = cursor.fetchone()
    return None if row is None or row[0] is None else SnapshotAge(row[0], row[1] or 0.0)
