"""Timelines: whether a server still has the WAL that changes were captured from.

A promoted standby and a restored server write on a new timeline. Its history tells where each
earlier one ended for that server. What was captured above that end is not in the server's past: it
holds other changes there, or none, and its slot would go on silently behind them.

All is asked over a replication connection, which the privilege of a capture is enough for; on a
standby no SQL function tells the timeline that is replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from psycopg import pq

from pgcdc_assets.errors import ConnectionLost, DefiniteError, RawZoneError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.errors import connection_failure
from pgcdc_assets.postgres.libpq import connect, execute

_START_SECONDS = 30.0


@dataclass(frozen=True)
class ServerTimeline:
    """The timeline that a server writes on, or replays; asked over an open connection."""

    number: int
    conn: pq.abc.PGconn
    timeout_seconds: float

    @classmethod
    def read(cls, conn: pq.abc.PGconn, timeout_seconds: float) -> ServerTimeline:
        """Ask for the timeline.

        Raises:
            OSError: the connection broke, or the server did not answer in time.
        """
        found = execute(conn, b"IDENTIFY_SYSTEM", timeout_seconds)
        if found.status != pq.ExecStatus.TUPLES_OK:
            raise OSError(found.get_error_message())
        return cls(int(found.get_value(0, 1) or b"0"), conn, timeout_seconds)

    def switches(self) -> dict[int, Lsn]:
        """Ask where each earlier timeline ended for this server.

        Raises:
            DefiniteError: the server does not have its history.
            OSError: the connection broke, or the server did not answer in time.
        """
        if self.number == 1:
            return {}
        command = f"TIMELINE_HISTORY {self.number}".encode()
        found = execute(self.conn, command, self.timeout_seconds)
        if found.status != pq.ExecStatus.TUPLES_OK:
            reason = found.get_error_message().strip().rstrip(".")
            raise DefiniteError(
                reason=f"The server is on timeline {self.number} and cannot tell its history "
                f"({reason}), so that captured WAL may be missing there. Restore the file, or "
                "begin a new epoch with pgcdc renew."
            )
        return parse_history((found.get_value(0, 1) or b"").decode(errors="replace"))


def parse_history(text: str) -> dict[int, Lsn]:
    """Read a timeline history file: on each line a timeline, its end, and a reason."""
    switches = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[0].isdigit():
            switches[int(fields[0])] = Lsn.parse(fields[1])
    return switches


@contextlib.contextmanager
def server_timeline(settings: ConnectionSettings) -> Iterator[ServerTimeline]:
    """Connect and ask for the server's timeline; the connection is closed at the end.

    Raises:
        ConfigurationError: the settings do not lead to a replication connection.
        ConnectionLost: the server is down, or went away.
    """
    conn = pq.PGconn.connect_start(settings.conninfo_for("check", replication=True).encode())
    try:
        if not connect(conn, float(settings.connect_timeout)):
            raise connection_failure(settings.describe(), conn.get_error_message())
        yield ServerTimeline.read(conn, _START_SECONDS)
    except OSError as error:
        raise ConnectionLost(
            server=settings.describe(), doing="asking for the timeline", reason=str(error)
        ) from error
    finally:
        conn.finish()


def check_timeline(
    raw_zone: str, captured_on: int | None, captured_through: Lsn, server: ServerTimeline
) -> None:
    """Refuse a server that does not have the WAL that was captured.

    Args:
        captured_on: the timeline of the newest landed window; None where an earlier release, which
            did not record it, has landed that.

    Raises:
        RawZoneError: captured changes are not in the server's past.
        DefiniteError: the server does not have its history.
        OSError: the connection broke.
    """
    if captured_on in (None, server.number):
        return
    reason = _lost_wal(captured_on or 0, captured_through, server.number, server.switches())
    if reason:
        raise RawZoneError(
            raw_zone=raw_zone,
            reason=f"it is captured through {captured_through} on timeline {captured_on}, but "
            f"{reason}. The server was restored from a backup, or replaced by a standby that had "
            "not received all: captured changes may be none of it. Nothing was confirmed. Begin a "
            "new epoch with pgcdc renew.",
        )


def _lost_wal(
    captured_on: int, captured_through: Lsn, current: int, switches: Mapping[int, Lsn]
) -> str | None:
    end = switches.get(captured_on)
    if end is None:
        return f"the server is on timeline {current}, which does not descend from that"
    if captured_through > end:
        return f"the server left that timeline at {end} and is on timeline {current} now"
    return None
