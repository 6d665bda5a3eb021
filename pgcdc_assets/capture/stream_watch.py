"""The check that a stream's reader thread calls every second: the lease is held, time is left."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import TYPE_CHECKING

from pgcdc_assets.errors import ConnectionLost, TransientError

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection


def build_watch(
    conn: Connection,
    is_overdue: Callable[[], bool],
    limit: float | None,
    read_notice: Callable[[], str] = str,
) -> Callable[[], None]:
    """Return the check, which raises an error to end the stream.

    A fast shutdown of the server ends the lease's session first, and then waits until every
    walsender's client has confirmed all WAL. A capture does not confirm all WAL, so the check ends
    the stream when the lease's session has ended.

    Args:
        conn: the connection of the lease.
        is_overdue: whether the window in progress has reached the time limit.
        limit: the time limit in seconds, for the error.
        read_notice: function that returns what the stream waits for, as a sentence; empty if the
            server has not reported anything.
    """
    hang_up = select.poll()
    hang_up.register(conn.fileno(), select.POLLRDHUP)
    server = f"database {conn.info.dbname}"

    def watch() -> None:
        if hang_up.poll(0):
            raise ConnectionLost(
                server=server,
                doing="capturing",
                reason="the server ended the session that holds the lease",
            )
        if is_overdue():
            remedy = read_notice() or (
                "Raise stream.total_seconds, or reduce windows.max_bytes, then run it again."
            )
            raise TransientError(
                reason=f"The capture took longer than its limit of {limit:g} s. No change is lost. "
                f"{remedy}"
            )

    return watch
