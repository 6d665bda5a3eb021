"""The changes of the soak: 20 transactions a second, each with ten changes of one table.

A transaction inserts one order, deletes the oldest one and updates eight, so that the tables keep
their size.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing

import psycopg2

from benchmarks.freshness_source import ROWS, ChangedTable
from pgcdc_assets.lsn import Lsn

CHANGES = 10
TRANSACTIONS_PER_SECOND = 20


class SoakWriter:
    """Writer of changes in a thread, a context manager.

    Attributes:
        changes: number of committed changes.
        end: the end of the WAL after the last change.
    """

    def __init__(self, conninfo: str, names: Sequence[str]) -> None:
        self.changes = 0
        self.end = Lsn(0)
        self._conninfo = conninfo
        rows = ROWS // len(names)
        self._tables = [ChangedTable(name, CHANGES, 1, rows + 1) for name in names]
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def __enter__(self) -> SoakWriter:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()

    def check(self) -> None:
        """Raise the error of the thread, if the thread failed."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._failure = error

    def _write(self) -> None:
        chance = random.Random(1)
        pause = 1 / TRANSACTIONS_PER_SECOND
        with closing(psycopg2.connect(self._conninfo)) as conn, conn.cursor() as cursor:
            number = 0
            while not self._stopping.is_set():
                due = time.monotonic() + pause
                self.changes += self._tables[number % len(self._tables)].change(cursor, chance)
                conn.commit()
                number += 1
                time.sleep(max(0.0, due - time.monotonic()))
            cursor.execute("select pg_current_wal_flush_lsn()::text")
            (end,) = cursor.fetchone() or ("0/0",)
            self.end = Lsn.parse(end)
