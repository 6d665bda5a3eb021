"""The changes of the soak: 20 transactions a second, each with ten changes of one table.

A transaction inserts one order, deletes the oldest one and updates eight, so that the tables keep
their size.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import psycopg2

from benchmarks.freshness_source import ROWS, ChangedTable, WriterThread
from pgcdc_assets.lsn import Lsn

CHANGES = 10
TRANSACTIONS_PER_SECOND = 20


class SoakWriter(WriterThread):
    """Writer of the soak's transactions.

    Attributes:
        end: the end of the WAL after the last change.
    """

    def __init__(self, conninfo: str, names: Sequence[str]) -> None:
        super().__init__(conninfo)
        self.end = Lsn(0)
        rows = ROWS // len(names)
        self._tables = [ChangedTable(name, CHANGES, 1, rows + 1) for name in names]

    def _write(
        self, conn: psycopg2.extensions.connection, cursor: psycopg2.extensions.cursor
    ) -> None:
        chance = random.Random(1)
        pause = 1 / TRANSACTIONS_PER_SECOND
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
