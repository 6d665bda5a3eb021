"""Random DDL of one connection beside random row changes of other connections.

Each DDL step is one transaction that holds a lock for a short time, or fails. `counts` tells how
often each step was committed. The tables are known by their OIDs, because they are renamed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock, Thread

import psycopg2
from psycopg2.extensions import cursor as Cursor

from pgcdc_assets_tests.support.convergence.row_writer import (
    EXPECTED,
    read_columns,
    read_name,
    write_rows,
)
from pgcdc_assets_tests.support.convergence.schema_steps import STEPS, Target, create_again

TABLES = """
    create schema elsewhere;
    create table orders (id int primary key, v text, a int, b varchar(10));
    create table items (id int primary key, v text, a smallint, d date);
    create table events (id int, v text, a int, part int default 0, primary key (id, part))
        partition by list (part);
    create table events_0 partition of events for values in (0);
    create table events_1 partition of events for values in (1);
    insert into orders select i, 'first', i, 'b' || i from generate_series(1, 20) i;
    insert into items select i, 'first', i, '2024-01-01' from generate_series(1, 20) i;
    insert into events select i, 'first', i, i % 2 from generate_series(1, 20) i;
"""
# The declared names. `orders` and `items` may be renamed or created again.
NAMES = ("orders", "items", "events")


@dataclass
class SchemaWorkload:
    """Connections that commit random transactions, and one that commits random DDL.

    Attributes:
        pause_seconds: mean pause between two DDL steps.
        counts: committed DDL steps by name, and `rows` for transactions of row changes.
    """

    conninfo: str
    seed: int
    connections: int = 3
    pause_seconds: float = 0.4
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._stop = Event()
        self._is_running = Event()
        self._is_running.set()
        self._guard = Lock()
        self._errors: list[BaseException] = []
        self._ids: dict[str, int] = {}
        self._threads = [
            Thread(target=self._work, args=(self._rows, f"rows {number}", 0.05))
            for number in range(self.connections)
        ]
        self._threads.append(Thread(target=self._work, args=(self._ddl, "ddl", self.pause_seconds)))

    def __enter__(self) -> SchemaWorkload:
        with closing(psycopg2.connect(self.conninfo)) as connection:
            with connection.cursor() as cursor:
                for name in NAMES:
                    cursor.execute("select %s::regclass::oid::bigint", (name,))
                    ((self._ids[name],),) = cursor.fetchall()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._is_running.set()
        for thread in self._threads:
            thread.join(60)
        if self._errors:
            raise self._errors[0]

    @property
    def ddl_count(self) -> int:
        """The number of committed DDL steps."""
        return self.counts.total() - self.counts["rows"]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause new transactions for the block."""
        self._is_running.clear()
        try:
            yield
        finally:
            self._is_running.set()

    def _work(self, act: Callable[[Cursor, random.Random], str], name: str, pause: float) -> None:
        decide = random.Random(f"{self.seed}-{name}")
        try:
            with closing(psycopg2.connect(self.conninfo, application_name=name)) as connection:
                with connection.cursor() as cursor:
                    cursor.execute("set lock_timeout = '500ms'; set deadlock_timeout = '50ms'")
                    connection.commit()
                    while not self._stop.is_set():
                        self._attempt(cursor, act, decide)
                        self._stop.wait(decide.random() * 2 * pause)
                        self._is_running.wait()
        except BaseException as error:
            self._errors.append(error)

    def _attempt(
        self, cursor: Cursor, act: Callable[[Cursor, random.Random], str], decide: random.Random
    ) -> None:
        try:
            done = act(cursor, decide)
            if decide.random() < 0.05:
                cursor.connection.rollback()
                return
            cursor.connection.commit()
        except EXPECTED:
            cursor.connection.rollback()
            return
        if done:
            with self._guard:
                self.counts[done] += 1

    def _rows(self, cursor: Cursor, decide: random.Random) -> str:
        write_rows(cursor, decide, list(self._ids.values()))
        return "rows"

    def _ddl(self, cursor: Cursor, decide: random.Random) -> str:
        step = decide.choices(list(STEPS), list(STEPS.values()))[0]
        name = decide.choice(NAMES[:2])
        table = read_name(cursor, self._ids[name])
        assert table is not None
        target = Target(name, table, read_columns(cursor, self._ids[name]))
        if not step(cursor, decide, target):
            return ""
        if step is create_again:
            cursor.connection.commit()
            cursor.execute("select %s::regclass::oid::bigint", (name,))
            ((self._ids[name],),) = cursor.fetchall()
        return step.__name__
