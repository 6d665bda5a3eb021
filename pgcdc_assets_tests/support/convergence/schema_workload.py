"""Random DDL of one connection during random row changes of other connections.

Each DDL step is one transaction that holds a lock for a short time, or fails. The tables are known
by their OIDs, because they are renamed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import cursor as Cursor

from pgcdc_assets_tests.support.convergence.history_audit import AUDIT, audit_table
from pgcdc_assets_tests.support.convergence.row_writer import (
    EXPECTED,
    read_columns,
    read_name,
    write_rows,
)
from pgcdc_assets_tests.support.convergence.schema_steps import STEPS, Target, create_again
from pgcdc_assets_tests.support.convergence.writers import Actor, Writers

Act = Callable[[Cursor, random.Random], str]

TABLES = """
    create schema elsewhere;
    create table orders (
        id int primary key, v text, k int not null default 0, a int, b varchar(10));
    create table items (
        id int primary key, v text, k int not null default 0, a smallint, d date);
    create unique index on orders (id);
    create unique index on items (id);
    create table events (id int, v text, a int, part int default 0, primary key (id, part))
        partition by list (part);
    create table events_0 partition of events for values in (0);
    create table events_1 partition of events for values in (1);
    insert into orders select i, 'first', 0, i, 'b' || i from generate_series(1, 20) i;
    insert into items select i, 'first', 0, i, '2024-01-01' from generate_series(1, 20) i;
    insert into events select i, 'first', i, i % 2 from generate_series(1, 20) i;
"""
# The declared names. `orders` and `items` may be renamed or created again.
NAMES = ("orders", "items", "events")


class SchemaWorkload(Writers):
    """Connections that commit random transactions, and a connection that commits random DDL.

    The outcomes are the committed DDL steps by name, `rows` for transactions of row changes, and
    `nothing` for transactions that failed, were rolled back, or found nothing to change.

    Args:
        pause_seconds: mean pause between two DDL steps.
    """

    def __init__(
        self, conninfo: str, seed: int, connections: int = 3, pause_seconds: float = 0.4
    ) -> None:
        actors = {f"rows {n}": Actor(self._committed(self._rows), 0.1) for n in range(connections)}
        actors["ddl"] = Actor(self._committed(self._ddl), 2 * pause_seconds)
        super().__init__(conninfo, seed, actors)
        self._ids: dict[str, int] = {}

    def __enter__(self) -> SchemaWorkload:
        with closing(psycopg2.connect(self.conninfo)) as connection:
            with connection.cursor() as cursor:
                cursor.execute("select to_regclass('audit') is null")
                ((is_first,),) = cursor.fetchall()
                if is_first:
                    cursor.execute(AUDIT)
                for name in NAMES:
                    if is_first:
                        audit_table(cursor, sql.Identifier("public", name), name)
                    cursor.execute("select %s::regclass::oid::bigint", (name,))
                    ((self._ids[name],),) = cursor.fetchall()
            connection.commit()
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        self._restore_names()

    def _restore_names(self) -> None:
        """Restore the declared names: a table that was recreated and renamed is not found."""
        with closing(psycopg2.connect(self.conninfo)) as connection:
            with connection, connection.cursor() as cursor:
                for name, oid in self._ids.items():
                    table = read_name(cursor, oid)
                    assert table is not None
                    schema, current = table.strings
                    if schema != "public":
                        cursor.execute(sql.SQL("alter table {} set schema public").format(table))
                    if current != name:
                        moved = sql.Identifier("public", current)
                        to = sql.SQL("alter table {} rename to {}")
                        cursor.execute(to.format(moved, sql.Identifier(name)))

    @property
    def ddl_count(self) -> int:
        """The number of committed DDL steps."""
        return self.outcomes.total() - self.outcomes["rows"] - self.outcomes["nothing"]

    @staticmethod
    def _committed(act: Act) -> Act:
        """Return an action that commits, or rolls back after an expected error or by chance."""

        def commit(cursor: Cursor, decide: random.Random) -> str:
            try:
                done = act(cursor, decide)
                if decide.random() < 0.05:
                    cursor.connection.rollback()
                    return "nothing"
                cursor.connection.commit()
            except EXPECTED:
                cursor.connection.rollback()
                return "nothing"
            return done

        return commit

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
            return "nothing"
        if step is create_again:
            cursor.connection.commit()
            cursor.execute("select %s::regclass::oid::bigint", (name,))
            ((self._ids[name],),) = cursor.fetchall()
        return step.__name__
