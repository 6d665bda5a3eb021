"""An exported snapshot of a standby, with an exact LSN.

A standby makes transactions visible in the order of their commit records, while one process replays
the WAL. The replayed position that the server reports is behind that process: it moves after a
record was applied. So a snapshot between two readings of the position has an exact LSN if no commit
record is among the records from the first position on, up to the record that follows the second
position. The records are read from the primary's WAL. Nothing is paused, and no privilege is needed
besides those of a capture (docs/decisions/0038-snapshots-from-a-standby.md).

Sources: ApplyWalRecord in src/backend/access/transam/xlogrecovery.c, xact_redo_commit in xact.c.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2

from pgcdc_assets.errors import ConfigurationError, ConnectionLost, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import (
    ConnectionSettings,
    connect,
    query_connection,
    sorted_failures,
)
from pgcdc_assets.postgres.errors import statement_failure
from pgcdc_assets.postgres.recovery_conflicts import CONFLICTS
from pgcdc_assets.postgres.slots.creation import ExportedSnapshot
from pgcdc_assets.postgres.slots.status import read_server_identity
from pgcdc_assets.postgres.wal.positions import advance_wal, read_barrier, read_current_lsn
from pgcdc_assets.postgres.wal.records import LONGEST_HEADER_BYTES, WalRange
from pgcdc_assets.postgres.wal.stream import read_wal
from pgcdc_assets.postgres.wal.timelines import server_timeline

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_logger = logging.getLogger(__name__)

# Time limits for the standby to replay the primary's position, and for the proof of an LSN.
_REPLAY_SECONDS = 300.0
_ATTEMPT_SECONDS = 30.0
_POLL_SECONDS = 0.02
_PAUSE_SECONDS = 0.005

# WAL before the snapshot that is compared between the two servers.
_COMPARED_BYTES = 8192
# An attempt during which more was replayed is repeated.
_MOST_BYTES = 1 << 20

# In READ COMMITTED, each statement has a snapshot of its own. The second statement exports its
# snapshot, which was taken after the first position was read, and before the second one was.
_ATTEMPT = """
rollback;
begin isolation level read committed, read only;
select set_config('pgcdc.replayed', pg_last_wal_replay_lsn()::text, false);
select current_setting('pgcdc.replayed'), pg_last_wal_replay_lsn()::text, pg_export_snapshot();
"""

_LAYOUT = """
select current_setting('wal_block_size')::int, pg_size_bytes(current_setting('wal_segment_size'))
"""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A commit of the primary that a snapshot contains.

    Attributes:
        start: position before the commit.
        end: position after it; flushed.
        taken_at: the primary's clock before the commit.
    """

    start: Lsn
    end: Lsn
    taken_at: dt.datetime


@contextlib.contextmanager
def export_standby_snapshot(
    primary: ConnectionSettings, standby: ConnectionSettings
) -> Iterator[ExportedSnapshot]:
    """Export a snapshot of a standby that is exact for all tables, and hold it for the block.

    A transaction is in the snapshot if and only if its commit LSN is below `consistent_point`. The
    snapshot has everything that the primary has committed before the call.

    Args:
        primary: the server of the capture's slot.
        standby: a standby of this server.

    Raises:
        ConfigurationError: the standby is not a standby of the primary, or a server does not send
            its WAL.
        TransientError: the standby is too far behind, commits all the time, or ends each snapshot.
        ConnectionLost: a server is down, or went away.
    """
    timeline = check_standby(primary, standby)
    with contextlib.closing(_Session(standby)) as session:
        with query_connection(primary, "snapshot") as current:
            mark = _write_mark(current)
            with sorted_failures(standby, "snapshot"):
                _wait_for_replay(session.conn, primary, standby, mark.end)
            snapshot = _Proof(primary, standby, timeline, mark, current, session).export()
        yield snapshot


class _Session:
    """The session of a standby that exports a snapshot; opened again if the standby ends it."""

    def __init__(self, standby: ConnectionSettings) -> None:
        self._standby = standby
        self.conn = self._open()

    def _open(self) -> Connection:
        return connect(self._standby, "snapshot", statement_timeout_ms=0)

    def reopen(self) -> None:
        """Replace the connection.

        Raises:
            ConnectionLost: the standby is down.
        """
        self.close()
        self.conn = self._open()

    def close(self) -> None:
        """Close the connection, and end the snapshot."""
        self.conn.close()


def check_standby(primary: ConnectionSettings, standby: ConnectionSettings) -> int:
    """Check that a server is a standby of another one, and return their timeline.

    Raises:
        ConfigurationError: it is not.
        TransientError: the standby has not followed a failover yet.
        ConnectionLost: a server is down, or went away.
    """
    names = f"snapshot.dsn_env names {standby.describe()}, which"
    with query_connection(primary, "check") as conn:
        source = read_server_identity(conn)
    with query_connection(standby, "check") as conn:
        other = read_server_identity(conn)
    if source.in_recovery:
        raise ConfigurationError(
            reason=f"The capture reads from {primary.describe()}, which is a standby itself, and "
            "so do its copies: remove snapshot.dsn_env."
        )
    if not other.in_recovery:
        raise ConfigurationError(
            reason=f"{names} is not a standby. Name a standby of {primary.describe()}, or remove "
            "snapshot.dsn_env."
        )
    if other.system_identifier != source.system_identifier:
        raise ConfigurationError(
            reason=f"{names} belongs to another cluster (system identifier "
            f"{other.system_identifier}) than {primary.describe()} ({source.system_identifier}). "
            "Name a standby of this server."
        )
    if other.database != source.database:
        raise ConfigurationError(
            reason=f"{names} is another database than the capture's, {source.database}. Name the "
            "same database."
        )
    with server_timeline(standby) as server:
        if server.number != source.timeline:
            raise TransientError(
                reason=f"{names} replays timeline {server.number}, and {primary.describe()} "
                f"writes timeline {source.timeline}. Wait until the standby follows the primary, "
                "or name another standby."
            )
    return source.timeline


def _write_mark(current: Connection) -> _Mark:
    # Two snapshots must not have one LSN, nor a snapshot that of the end of a window.
    with current.cursor() as cursor:
        cursor.execute("select pg_current_wal_insert_lsn()::text, clock_timestamp()")
        row = cursor.fetchone()
    assert row is not None
    advance_wal(current)
    return _Mark(Lsn.parse(row[0]), read_barrier(current), row[1])


def _wait_for_replay(
    conn: Connection, primary: ConnectionSettings, standby: ConnectionSettings, target: Lsn
) -> None:
    began = time.monotonic()
    is_reported = False
    while (replayed := read_current_lsn(conn)) < target:
        seconds = time.monotonic() - began
        if seconds > _REPLAY_SECONDS:
            raise TransientError(
                reason=f"{standby.describe()} has replayed WAL to {replayed}, and "
                f"{primary.describe()} was at {target} {seconds:.0f} s ago: "
                f"{describe_delay(conn, target - replayed)}"
            )
        if seconds > 1 and not is_reported:
            is_reported = True
            _logger.info(
                "Waiting until %s, at %s, has replayed %s", standby.describe(), replayed, target
            )
        time.sleep(_POLL_SECONDS)


def describe_delay(conn: Connection, byte_count: int) -> str:
    """Describe how far a standby is behind, and the remedy."""
    with conn.cursor() as cursor:
        cursor.execute("select pg_is_wal_replay_paused()")
        row = cursor.fetchone()
    behind = f"the standby is {byte_count:,} bytes behind"
    if row == (True,):
        return f"{behind}, and its replay is paused. Resume it with: select pg_wal_replay_resume()"
    return f"{behind}. Wait until the standby has caught up, or remove snapshot.dsn_env."


@dataclass(frozen=True, slots=True)
class _Proof:
    """Attempts to take a snapshot of a standby with an exact LSN.

    Attributes:
        mark: a commit that the standby has replayed.
        current: a connection to the primary.
        session: a session of the standby, which exports the snapshot.
    """

    primary: ConnectionSettings
    standby: ConnectionSettings
    timeline: int
    mark: _Mark
    current: Connection
    session: _Session

    def export(self) -> ExportedSnapshot:
        """Export a snapshot with an exact LSN."""
        with sorted_failures(self.primary, "snapshot"), self.current.cursor() as cursor:
            cursor.execute(_LAYOUT)
            layout = cursor.fetchone()
        assert layout is not None
        deadline = time.monotonic() + _ATTEMPT_SECONDS
        conflicts = 0
        while True:
            try:
                snapshot = self._attempt(*layout)
            except psycopg2.Error as error:
                self._check_ended(error)
                conflicts += 1
                snapshot = None
            if snapshot is not None:
                return snapshot
            if time.monotonic() > deadline:
                raise TransientError(
                    reason=f"No snapshot of {self.standby.describe()} had an exact LSN within "
                    f"{_ATTEMPT_SECONDS:g} s, because the standby replays commits all the time"
                    f"{f', or ended it ({conflicts} times)' if conflicts else ''}. Run it again."
                )
            time.sleep(_PAUSE_SECONDS)

    def _check_ended(self, error: psycopg2.Error) -> None:
        """Open the session again after a conflict with recovery. Raise other errors."""
        failure = statement_failure(self.standby.describe(), "exporting a snapshot", error)
        if error.pgcode not in CONFLICTS and not isinstance(failure, ConnectionLost):
            raise failure or error
        self.session.reopen()

    def _attempt(self, page_bytes: int, segment_bytes: int) -> ExportedSnapshot | None:
        with self.session.conn.cursor() as cursor:
            cursor.execute(_ATTEMPT)
            row = cursor.fetchone()
        assert row is not None
        before, after, name = Lsn.parse(row[0]), Lsn.parse(row[1]), row[2]
        # Read after the snapshot: the standby had received no later WAL.
        with sorted_failures(self.primary, "snapshot"):
            flushed = read_current_lsn(self.current)
        if after - before > _MOST_BYTES or flushed < after:
            return None
        start = min(before, max(self.mark.start, Lsn(after - _COMPARED_BYTES)))
        end = min(flushed, Lsn(after + LONGEST_HEADER_BYTES))
        wal = read_wal(self.primary, self.timeline, start, end)
        if WalRange(start, wal, page_bytes, segment_bytes).has_commit(before, after):
            return None
        if read_wal(self.standby, self.timeline, start, after) != wal[: after - start]:
            raise ConfigurationError(
                reason=f"snapshot.dsn_env names {self.standby.describe()}, whose WAL before "
                f"{after} is not that of {self.primary.describe()}: the two servers were copied "
                "from one, and were written to since. Name a standby of the capture's server."
            )
        return ExportedSnapshot("", after, name, self.mark.taken_at, timeline=self.timeline)
