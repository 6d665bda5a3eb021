"""The source of the freshness benchmark: orders that change at a constant rate, and markers.

Ten times a second, a transaction of a hundred row changes is committed: 80 updates, 15 inserts and
5 deletes. Once a second, a separate transaction commits a marker: an order with a high number,
whose `updated_at` is the time by the source's clock.

With several tables, each transaction changes a tenth of them: ten changes of each in turn with a
hundred tables. Marker number k is in table k modulo the number of tables.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psycopg2
import psycopg2.extensions

from pgcdc_assets.demo.server import EmbeddedServer

NAME = "freshness"
PUBLICATION = "freshness"
TABLE = "orders"
DATABASE = "bench"
# The environment variable of the code location that has the number of tables.
TABLES = "PGCDC_BENCH_TABLES"

# Rows of all tables.
ROWS = 100_000
CHANGES_PER_SECOND = 1_000
# Markers have higher numbers.
MARKERS = 1_000_000_000_000

_TICKS_PER_SECOND = 10

_COLUMNS = """
    id bigint primary key, customer_id bigint not null, status text not null,
    amount numeric(12,2) not null, note text, updated_at timestamptz not null
"""
_INSERT = """
    insert into {}
    select i, mod(i * 7919, 500000), 'new', mod(i, 100000) / 100.0,
        'left at the door of house ' || i || ', ' || md5(i::text), clock_timestamp()
    from generate_series(%s, %s) i
"""
_UPDATE = """
    update {} set status = 'paid', amount = amount + 1, updated_at = clock_timestamp()
    where id = any(%s)
"""
_DELETE = "delete from {} where id between %s and %s"
_MARK = "insert into {} values (%s, 0, 'marker', 0, null, clock_timestamp())"


@dataclass
class ChangedTable:
    """The orders of one table: numbers from `first` to before `next`."""

    name: str
    changes: int
    first: int
    next: int

    def change(self, cursor: psycopg2.extensions.cursor, chance: random.Random) -> int:
        """Insert after the last order, delete the first orders, and update orders in between.

        Returns:
            The number of changed rows.
        """
        inserts, deletes = max(1, self.changes * 15 // 100), max(1, self.changes * 5 // 100)
        kept = range(self.first + deletes, self.next)
        changed = 0
        for statement, parameters in (
            (_UPDATE, (chance.sample(kept, self.changes - inserts - deletes),)),
            (_INSERT, (self.next, self.next + inserts - 1)),
            (_DELETE, (self.first, self.first + deletes - 1)),
        ):
            cursor.execute(statement.format(self.name), parameters)
            changed += cursor.rowcount
        self.first += deletes
        self.next += inserts
        return changed


def table_names(tables: int) -> list[str]:
    """Return the names of the tables: `orders`, or `orders_0` and so on for several."""
    return [TABLE] if tables == 1 else [f"{TABLE}_{number}" for number in range(tables)]


@contextmanager
def source(folder: Path, tables: int = 1) -> Iterator[EmbeddedServer]:
    """Run a server with the tables and their first rows for the block."""
    server = EmbeddedServer(folder / "postgres")
    names = table_names(tables)
    try:
        server.start()
        with closing(psycopg2.connect(server.conninfo())) as conn, conn.cursor() as cursor:
            conn.autocommit = True
            cursor.execute(f"create database {DATABASE}")
        with closing(psycopg2.connect(server.conninfo(DATABASE))) as conn, conn.cursor() as cursor:
            for name in names:
                cursor.execute(f"create table {name} ({_COLUMNS})")
                cursor.execute(_INSERT.format(name), (1, ROWS // tables))
            cursor.execute(f"create publication {PUBLICATION} for table {', '.join(names)}")
            conn.commit()
        yield server
    finally:
        server.remove()


class WriterThread(ABC):
    """Writer of changes in a thread, a context manager.

    Attributes:
        changes: number of committed changes.
    """

    def __init__(self, conninfo: str) -> None:
        self.changes = 0
        self._conninfo = conninfo
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def __enter__(self) -> Self:
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
            with closing(psycopg2.connect(self._conninfo)) as conn, conn.cursor() as cursor:
                self._write(conn, cursor)
        except Exception as error:
            self._failure = error

    @abstractmethod
    def _write(
        self, conn: psycopg2.extensions.connection, cursor: psycopg2.extensions.cursor
    ) -> None:
        """Write until `_stopping` is set."""


class Writer(WriterThread):
    """Writer of a thousand changes a second, and of markers.

    At its end, each table gets a marker after its last change.

    Attributes:
        markers: number of committed markers. Marker number k is in table k modulo `tables`.
    """

    def __init__(self, conninfo: str, tables: int = 1) -> None:
        super().__init__(conninfo)
        self.markers = 0
        self.seconds = 0.0
        self._chance = random.Random(1)
        self._groups = self._divide(table_names(tables))

    @staticmethod
    def _divide(names: Sequence[str]) -> list[list[ChangedTable]]:
        """Return the tables of each transaction of a second."""
        groups = min(len(names), _TICKS_PER_SECOND)
        changes = CHANGES_PER_SECOND // _TICKS_PER_SECOND * groups // len(names)
        rows = ROWS // len(names)
        return [
            [ChangedTable(name, changes, 1, rows + 1) for name in names[group::groups]]
            for group in range(groups)
        ]

    def _write(
        self, conn: psycopg2.extensions.connection, cursor: psycopg2.extensions.cursor
    ) -> None:
        names = table_names(sum(map(len, self._groups)))
        began = time.monotonic()
        tick = 0
        while not self._stopping.is_set() or tick % _TICKS_PER_SECOND:
            for table in self._groups[tick % len(self._groups)]:
                self.changes += table.change(cursor, self._chance)
            conn.commit()
            tick += 1
            if tick % _TICKS_PER_SECOND == 0:
                number = self.markers + 1
                cursor.execute(_MARK.format(names[number % len(names)]), (MARKERS + number,))
                conn.commit()
                self.markers = number
            self.seconds = time.monotonic() - began
            time.sleep(max(0.0, tick / _TICKS_PER_SECOND - self.seconds))
        for number in range(self.markers + 1, self.markers + len(names) + 1):
            cursor.execute(_MARK.format(names[number % len(names)]), (MARKERS + number,))
        conn.commit()
        self.markers += len(names)
