"""The source of the freshness benchmark: orders that change at a constant rate, and markers.

Ten times a second, a transaction of a hundred row changes is committed: 80 updates, 15 inserts and
5 deletes. Once a second, a separate transaction commits a marker: an order with a high number,
whose
`updated_at` is the time by the source's clock.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg2
import psycopg2.extensions

from pgcdc_assets.demo.server import EmbeddedServer

NAME = "freshness"
PUBLICATION = "freshness"
TABLE = "orders"
DATABASE = "bench"

ROWS = 100_000
CHANGES_PER_SECOND = 1_000
# Markers have higher numbers.
MARKERS = 1_000_000_000_000

_TICKS_PER_SECOND = 10
_CHANGES = CHANGES_PER_SECOND // _TICKS_PER_SECOND
_INSERTS, _DELETES = _CHANGES * 15 // 100, _CHANGES * 5 // 100
_UPDATES = _CHANGES - _INSERTS - _DELETES

_SCHEMA = f"""
    create table orders (
        id bigint primary key, customer_id bigint not null, status text not null,
        amount numeric(12,2) not null, note text, updated_at timestamptz not null
    );
    create publication {PUBLICATION} for table orders
"""
_INSERT = """
    insert into orders
    select i, mod(i * 7919, 500000), 'new', mod(i, 100000) / 100.0,
        'left at the door of house ' || i || ', ' || md5(i::text), clock_timestamp()
    from generate_series(%s, %s) i
"""
_UPDATE = """
    update orders set status = 'paid', amount = amount + 1, updated_at = clock_timestamp()
    where id = any(%s)
"""
_DELETE = "delete from orders where id between %s and %s"
_MARK = "insert into orders values (%s, 0, 'marker', 0, null, clock_timestamp())"


@contextmanager
def source(folder: Path) -> Iterator[EmbeddedServer]:
    """Run a server with the table and its first rows for the block."""
    server = EmbeddedServer(folder / "postgres")
    try:
        server.start()
        with closing(psycopg2.connect(server.conninfo())) as conn, conn.cursor() as cursor:
            conn.autocommit = True
            cursor.execute(f"create database {DATABASE}")
        with closing(psycopg2.connect(server.conninfo(DATABASE))) as conn, conn.cursor() as cursor:
            cursor.execute(_SCHEMA)
            cursor.execute(_INSERT, (1, ROWS))
            conn.commit()
        yield server
    finally:
        server.remove()


class Writer:
    """Writer of changes in a thread, a context manager."""

    def __init__(self, conninfo: str) -> None:
        self.markers = 0
        self.changes = 0
        self.seconds = 0.0
        self._conninfo = conninfo
        self._chance = random.Random(1)
        self._first, self._next = 1, ROWS + 1
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def __enter__(self) -> Writer:
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

    def _write(
        self, conn: psycopg2.extensions.connection, cursor: psycopg2.extensions.cursor
    ) -> None:
        began = time.monotonic()
        tick = 0
        while not self._stopping.is_set() or tick % _TICKS_PER_SECOND:
            self._change(cursor)
            conn.commit()
            tick += 1
            if tick % _TICKS_PER_SECOND == 0:
                cursor.execute(_MARK, (MARKERS + self.markers + 1,))
                conn.commit()
                self.markers += 1
            self.seconds = time.monotonic() - began
            time.sleep(max(0.0, tick / _TICKS_PER_SECOND - self.seconds))

    def _change(self, cursor: psycopg2.extensions.cursor) -> None:
        """Insert after the last order, delete the first orders, and update orders in between."""
        kept = range(self._first + _DELETES, self._next)
        last_inserted = self._next + _INSERTS - 1
        for statement, parameters in (
            (_UPDATE, (self._chance.sample(kept, _UPDATES),)),
            (_INSERT, (self._next, last_inserted)),
            (_DELETE, (self._first, self._first + _DELETES - 1)),
        ):
            cursor.execute(statement, parameters)
            self.changes += cursor.rowcount
        self._first += _DELETES
        self._next += _INSERTS
