"""Timelines: a check that a server's history contains the captured WAL.

A promoted standby and a restored server write on a new timeline (25.3 Continuous Archiving and
Point-in-Time Recovery, Timelines). The history file of the new timeline contains the LSN at which
each earlier timeline ended. Changes captured above this LSN are not part of the server's history:
the server has other changes at the same LSNs, or none, and its slot would continue without an
error.

The check runs over a replication connection (commands IDENTIFY_SYSTEM and TIMELINE_HISTORY, 53.4
Streaming Replication Protocol): the REPLICATION privilege is sufficient, and no SQL function
returns the timeline that a standby replays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from psycopg import pq

from pgcdc_assets.errors import (
    UNKNOWN_CAPTURE,
    ConnectionLost,
    DefiniteError,
    RawZoneError,
    renewal_command,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.libpq import execute, open_session

_START_SECONDS = 30.0


@dataclass(frozen=True)
class ServerTimeline:
    """The timeline that a primary writes, or a standby replays.

    Attributes:
        number: the timeline's number.
        conn: an open replication connection to the server.
        timeout_seconds: time limit of one command.
        renewal: the command that begins a new epoch, for errors.
    """

    number: int
    conn: pq.abc.PGconn
    timeout_seconds: float
    renewal: str = renewal_command(UNKNOWN_CAPTURE)

    @classmethod
    def read(
        cls, settings: ConnectionSettings, conn: pq.abc.PGconn, timeout_seconds: float
    ) -> ServerTimeline:
        """Read the timeline by IDENTIFY_SYSTEM.

        Raises:
            OSError: the connection was lost, or the server did not answer in time.
        """
        found = execute(conn, b"IDENTIFY_SYSTEM", timeout_seconds)
        if found.status != pq.ExecStatus.TUPLES_OK:
            raise OSError(found.get_error_message())
        number = int(found.get_value(0, 1) or b"0")
        return cls(number, conn, timeout_seconds, settings.renewal)

    def switches(self) -> Mapping[int, Lsn]:
        """Return the LSN at which each earlier timeline ended, by timeline.

        Raises:
            DefiniteError: the server does not have the history file.
            OSError: the connection was lost, or the server did not answer in time.
        """
        return self._switches

    @cached_property
    def _switches(self) -> dict[int, Lsn]:
        if self.number == 1:
            return {}
        command = f"TIMELINE_HISTORY {self.number}".encode()
        found = execute(self.conn, command, self.timeout_seconds)
        if found.status != pq.ExecStatus.TUPLES_OK:
            reason = found.get_error_message().strip().rstrip(".")
            raise DefiniteError(
                reason=f"The server is on timeline {self.number} and does not have the history "
                f"file of this timeline ({reason}), so captured WAL may be missing from the "
                f"server. Restore the file, or begin a new epoch with {self.renewal}."
            )
        return parse_history((found.get_value(0, 1) or b"").decode(errors="replace"))

    def starts(self) -> dict[int, Lsn]:
        """Return the LSN at which each timeline began, by timeline; the first one is missing.

        Raises:
            DefiniteError, OSError: as `switches`.
        """
        ends = self.switches()
        return dict(zip([*ends, self.number][1:], ends.values(), strict=True))


def parse_history(text: str) -> dict[int, Lsn]:
    """Return the end LSNs by timeline of a history file.

    Each line has a timeline, the LSN of its end, and a reason
    (src/backend/access/transam/timeline.c).
    """
    switches = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[0].isdigit():
            switches[int(fields[0])] = Lsn.parse(fields[1])
    return switches


@contextlib.contextmanager
def server_timeline(settings: ConnectionSettings) -> Iterator[ServerTimeline]:
    """Connect, read the server's timeline, and close the connection at the end of the block.

    Raises:
        ConfigurationError: the settings do not lead to a replication connection.
        ConnectionLost: the server is down, or went away.
    """
    conn = open_session(settings, "check", replication=True)
    try:
        yield ServerTimeline.read(settings, conn, _START_SECONDS)
    except OSError as error:
        raise ConnectionLost(
            server=settings.describe(), doing="asking for the timeline", reason=str(error)
        ) from error
    finally:
        conn.finish()


def check_timeline(
    raw_zone: str, captured_on: int | None, captured_through: Lsn, server: ServerTimeline
) -> None:
    """Raise an error for a server whose history does not contain the captured WAL.

    Args:
        raw_zone: path of the raw zone, for the error.
        captured_on: timeline of the newest landed window; None for a window of an early release,
            which did not record the timeline.
        captured_through: end of the newest landed window.
        server: the server's timeline.

    Raises:
        RawZoneError: captured changes are not part of the server's history.
        DefiniteError: the server does not have the history file.
        OSError: the connection was lost.
    """
    if captured_on in (None, server.number):
        return
    reason = _lost_wal(captured_on or 0, captured_through, server.number, server.switches())
    if reason:
        raise RawZoneError(
            raw_zone=raw_zone,
            reason=f"captured through {captured_through} on timeline {captured_on}, but "
            f"{reason}. The server was restored from a backup, or replaced by a standby that had "
            "not received all WAL: the server may not have the captured changes. Nothing was "
            f"confirmed. Begin a new epoch with {server.renewal}.",
        )


def check_branch(
    raw_zone: str, captured_on: int | None, began: Lsn | None, server: ServerTimeline
) -> None:
    """Raise an error for a server with another timeline of the captured timeline's number.

    Two standbys that were promoted without knowing of each other choose the same number.

    Args:
        captured_on: as for `check_timeline`.
        began: LSN at which this timeline began; None: the first timeline, or not recorded.

    Raises:
        RawZoneError, DefiniteError, OSError: as `check_timeline`.
    """
    if captured_on is None or began is None:
        return
    there = server.starts().get(captured_on)
    if there not in (None, began):
        raise RawZoneError(
            raw_zone=raw_zone,
            reason=f"captured on timeline {captured_on} that began at {began}, but timeline "
            f"{captured_on} of the server began at {there}. The server and the captured server "
            "were promoted or restored separately: the server may not have the captured changes. "
            f"Nothing was confirmed. Begin a new epoch with {server.renewal}.",
        )


def find_shared_end(captured_on: int | None, captured_through: Lsn, server: ServerTimeline) -> Lsn:
    """Return the LSN through which a server's history contains the captured WAL.

    For the arguments and further errors see `check_timeline`.

    Raises:
        DefiniteError: the server does not have the history file.
    """
    if captured_on in (None, server.number):
        return captured_through
    end = server.switches().get(captured_on or 0, Lsn(0))
    return min(captured_through, end)


def _lost_wal(
    captured_on: int, captured_through: Lsn, current: int, switches: Mapping[int, Lsn]
) -> str | None:
    end = switches.get(captured_on)
    if end is None:
        return f"the server is on timeline {current}, which does not descend from this timeline"
    if captured_through > end:
        return f"the server left this timeline at {end} and is on timeline {current} now"
    return None
