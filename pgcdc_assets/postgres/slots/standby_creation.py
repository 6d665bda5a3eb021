"""The creation of a slot on a standby, which waits for the primary (PG 16 and newer).

Decoding begins at a record of the running transactions, which only the primary writes: at each
checkpoint, and every 15 seconds if other WAL was written. The slot then waits for the transactions
of the record. `lock_timeout` does not bound either wait. `pg_log_standby_snapshot()` writes such a
record at once.

Sources: BackgroundWriterMain() in src/backend/postmaster/bgwriter.c, XactLockTableWait() in
src/backend/storage/lmgr/lmgr.c; 47.2.2 Replication Slots.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pgcdc_assets.error_text import first_sentence
from pgcdc_assets.errors import ConfigurationError, PgcdcError, TransientError
from pgcdc_assets.postgres.backend_cancellation import cancel_statement
from pgcdc_assets.postgres.blocking_transactions import oldest_blocking_transaction
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# Without a connection to the primary, a few intervals of its background writer.
_SHORTEST_LIMIT_SECONDS = 60.0
_RECORD_SECONDS = 0.5
_CANCEL_SECONDS = 0.1

_LOG = "select pg_catalog.pg_log_standby_snapshot()"
_REMEDY = (
    f"Execute on the primary: {_LOG}; or set primary_dsn_env to the environment variable with the "
    "primary's libpq URI, so that the creation does this."
)


class StandbyCreation:
    """The wait of a creation: a thread writes records on the primary, and ends a long wait.

    Args:
        connection: the replication connection that creates the slot.
        settings: the standby; `settings.primary` is its primary, if known.
    """

    def __init__(self, connection: Connection, settings: ConnectionSettings) -> None:
        self._connection = connection
        self._settings = settings
        limit = settings.lock_timeout_ms / 1000
        if settings.primary is None and limit > 0:
            limit = max(limit, _SHORTEST_LIMIT_SECONDS)
        self._limit = limit
        self._failure: Exception | None = None
        self._blocker = ""
        self._is_over = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Bound the creation inside the block, and help it."""
        done = threading.Event()
        thread = threading.Thread(target=self._run, args=[done], daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def failure(self, slot: str) -> PgcdcError | None:
        """Return the reason why the thread ended the creation; None if it did not."""
        server = self._settings.describe()
        if isinstance(self._failure, PgcdcError):
            return self._failure
        if self._failure is not None:
            primary = self._settings.primary
            assert primary is not None
            return ConfigurationError(
                reason=f"{primary.describe()} ({primary.variable}) writes no record of its running "
                f"transactions: {first_sentence(self._failure)} Name the primary of {server}, "
                "or remove primary_dsn_env.",
                setting="primary_dsn_env",
            )
        if not self._is_over:
            return None
        reason = self._blocker or (
            "a standby waits for a record of the running transactions of its primary, and for "
            f"the end of the transactions of this record. {_REMEDY}"
        )
        return TransientError(
            reason=f"Replication slot {slot} was not created within {self._limit:g} s on the "
            f"standby {server}: {reason} The incomplete slot was dropped."
        )

    def _run(self, done: threading.Event) -> None:
        end = time.monotonic() + self._limit if self._limit > 0 else float("inf")
        primary = self._settings.primary
        try:
            if primary is None:
                done.wait(None if end == float("inf") else self._limit)
            else:
                self._write_records(primary, done, end)
        except Exception as error:
            self._failure = error
        # Repeated: a cancel before the command has begun has no effect.
        while not done.wait(_CANCEL_SECONDS):
            self._is_over = True
            cancel_statement(self._settings, self._connection)

    def _write_records(
        self, primary: ConnectionSettings, done: threading.Event, end: float
    ) -> None:
        with query_connection(primary, "snapshot") as conn, conn.cursor() as cursor:
            while True:
                cursor.execute(_LOG)
                if done.wait(_RECORD_SECONDS):
                    return
                if time.monotonic() >= end:
                    break
            found = oldest_blocking_transaction(conn)
        if found is None:
            self._blocker = (
                "a standby waits until it has replayed a record of the running transactions of its "
                "primary, and the primary has no open transaction. Run it again when the standby "
                "has caught up."
            )
        else:
            self._blocker = (
                f"the creation waits for {found.describe()} on the primary ({found.remedy()})."
            )
