"""Random transactions over several concurrent connections.

Keys are from a small range, so most statements affect rows of other connections, and many
statements fail or wait.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg2
from psycopg2.extensions import cursor as Cursor

from pgcdc_assets_tests.support.convergence.writers import Actor, Writers

TABLES = """
    create table accounts (
        id int primary key, balance numeric(12, 2), note text, seen timestamptz, tags text[]);
    create table lines (
        order_id int, line text, quantity bigint, done boolean default false,
        primary key (order_id, line));
    create table documents (id int primary key, title text, body text, attachment bytea);
    create table documents_full (id int primary key, title text, body text, attachment bytea);
    create table notes (id int, note text);
    alter table documents alter body set storage external, alter attachment set storage external;
    alter table documents_full
        alter body set storage external, alter attachment set storage external;
    alter table documents_full replica identity full;
    alter table notes replica identity full;
    insert into accounts select i, i, 'first', now(), array['a', null]
        from generate_series(1, 30) i;
    insert into lines select i % 10, i::text, i from generate_series(1, 40) i;
    insert into documents select i, 'first', repeat(md5(i::text), 100), null
        from generate_series(1, 20) i;
    insert into documents_full select * from documents;
    insert into notes select i % 5, 'first' from generate_series(1, 20) i;
"""
KEYED = ("accounts", "lines", "documents", "documents_full")
KEYLESS = "notes"

_KEYS = 40
_NOTES = [None, "", "null", "NULL", "ü€", "quote \" and \\ and '", "{a,b}", "\t\n\r"]
_BALANCES = [None, "0", "-1.50", "9999999999.99", "NaN", "0.01"]
_TIMES = [None, "infinity", "-infinity", "0044-03-15 BC", "2026-03-29 02:30+01", "1970-01-01"]
_TAGS = [None, "{}", "{NULL}", '{"",a}', '{"a,b","c\\"d"}', "{{a,b},{c,d}}"]

_EXPECTED = (
    psycopg2.errors.UniqueViolation,
    psycopg2.errors.DeadlockDetected,
    psycopg2.errors.LockNotAvailable,
    # A database whose encoding lacks a letter of `_NOTES`.
    psycopg2.errors.UntranslatableCharacter,
)


class Workload(Writers):
    """Connections that commit random transactions until the end of the block.

    Args:
        prepared_share: share of the transactions that are prepared. A connection of its own ends
            prepared transactions.
    """

    def __init__(
        self, conninfo: str, seed: int, connections: int, prepared_share: float = 0.0
    ) -> None:
        actor = Actor(partial(_transaction, prepared_share=prepared_share), 0.1)
        actors = {str(number): actor for number in range(connections)}
        if prepared_share:
            actors["ends"] = Actor(_end_prepared, 0.3)
        super().__init__(conninfo, seed, actors)

    def __enter__(self) -> Workload:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _transaction(cursor: Cursor, decide: random.Random, prepared_share: float) -> str:
    is_prepared = decide.random() < prepared_share
    # A slot with two_phase cannot pass a rolled back prepared transaction that has truncated a
    # table, and has changed it in a subtransaction (docs/reference/limits.md).
    truncates = not is_prepared or decide.random() < 0.5
    has_savepoints = not is_prepared or not truncates
    try:
        for _ in range(decide.choice([1, 1, 2, 3, 8])):
            if has_savepoints and decide.random() < 0.15:
                _savepoint(cursor, decide, truncates=truncates)
            else:
                _statement(cursor, decide, truncates=truncates)
    except _EXPECTED:
        cursor.connection.rollback()
        return "failed"
    if decide.random() < 0.1:
        cursor.connection.rollback()
        return "rolled back"
    if is_prepared:
        # The gids repeat, unless a transaction of the same gid is prepared.
        gid = decide.choice([f"again {cursor.connection.info.dbname}", f"it's {uuid.uuid4()}"])
        try:
            cursor.execute("prepare transaction %s", (gid,))
        except psycopg2.errors.DuplicateObject:
            cursor.connection.rollback()
            return "failed"
        # The server is outside of a transaction now.
        cursor.connection.rollback()
        return "prepared"
    cursor.connection.commit()
    return "committed"


def _end_prepared(cursor: Cursor, decide: random.Random) -> str:
    """End about half of the prepared transactions."""
    cursor.connection.autocommit = True
    cursor.execute("select gid from pg_prepared_xacts where database = current_database()")
    for (gid,) in cursor.fetchall():
        if decide.random() < 0.5:
            end = decide.choice(["commit", "commit", "rollback"])
            cursor.execute(f"{end} prepared %s", (gid,))
    return "ended"


def _savepoint(cursor: Cursor, decide: random.Random, *, truncates: bool) -> None:
    cursor.execute("savepoint s")
    try:
        for _ in range(decide.randint(1, 4)):
            _statement(cursor, decide, truncates=truncates)
    except _EXPECTED:
        cursor.execute("rollback to s")
    else:
        cursor.execute(decide.choice(["rollback to s", "release s"]))


def _statement(cursor: Cursor, decide: random.Random, *, truncates: bool) -> None:
    kinds: list[tuple[Callable[[Cursor, random.Random], None], int]] = [
        (_insert, 8),
        (_update, 8),
        (_change_key, 4),
        (_swap_keys, 1),
        (_delete, 4),
        (_keyless, 3),
        (_bulk, 1),
        (_message, 1),
    ]
    if decide.random() < 0.01 and truncates:
        return _truncate(cursor, decide)
    (kind,) = decide.choices([k for k, _ in kinds], [weight for _, weight in kinds])
    kind(cursor, decide)


def _key(decide: random.Random) -> int:
    return decide.randint(1, _KEYS)


def _big(decide: random.Random) -> str | None:
    """Return a text that Postgres stores out of line, or None."""
    return decide.choice([None, "", decide.randbytes(2000).hex()])


def _insert(cursor: Cursor, decide: random.Random) -> None:
    table = decide.choice(KEYED)
    values: dict[str, tuple[Any, ...]] = {
        "accounts": (_key(decide), *map(decide.choice, (_BALANCES, _NOTES, _TIMES, _TAGS))),
        "lines": (_key(decide) % 10, str(_key(decide)), decide.randint(-(2**63), 2**63 - 1), True),
        "documents": (_key(decide), decide.choice(_NOTES), _big(decide), decide.randbytes(3000)),
    }
    row = values[table.removesuffix("_full")]
    places = ", ".join(["%s"] * len(row))
    # Half of the conflicts are errors; the other half does nothing.
    tail = decide.choice(["", "on conflict do nothing"])
    cursor.execute(f"insert into {table} values ({places}) {tail}", row)


def _update(cursor: Cursor, decide: random.Random) -> None:
    table = decide.choice(KEYED)
    assignments: dict[str, list[tuple[str, Any]]] = {
        "accounts": [
            ("balance = %s", decide.choice(_BALANCES)),
            ("note = %s", decide.choice(_NOTES)),
            ("seen = %s", decide.choice(_TIMES)),
            ("tags = %s", decide.choice(_TAGS)),
        ],
        "lines": [("quantity = %s", _key(decide)), ("done = %s", decide.random() < 0.5)],
        # An update of the title does not change the large values, which the stream omits.
        "documents": [
            ("title = %s", decide.choice(_NOTES)),
            ("title = %s", str(_key(decide))),
            ("body = %s", _big(decide)),
            ("attachment = %s", decide.randbytes(3000)),
        ],
    }
    assignment, value = decide.choice(assignments[table.removesuffix("_full")])
    column = "order_id" if table == "lines" else "id"
    modulus = 10 if table == "lines" else _KEYS + 1
    cursor.execute(
        f"update {table} set {assignment} where {column} = %s", (value, _key(decide) % modulus)
    )


def _change_key(cursor: Cursor, decide: random.Random) -> None:
    table = decide.choice(KEYED)
    old, new = _key(decide), _key(decide)
    if table == "lines":
        cursor.execute(
            "update lines set order_id = %s, line = %s where order_id = %s and line = %s",
            (new % 10, str(_key(decide)), old % 10, str(_key(decide))),
        )
        return
    cursor.execute(f"update {table} set id = %s where id = %s", (new, old))


def _swap_keys(cursor: Cursor, decide: random.Random) -> None:
    table = decide.choice(["accounts", "documents", "documents_full"])
    one, other, aside = _key(decide), _key(decide), -_key(decide)
    for new, old in ((aside, one), (one, other), (other, aside)):
        cursor.execute(f"update {table} set id = %s where id = %s", (new, old))


def _delete(cursor: Cursor, decide: random.Random) -> None:
    table = decide.choice(KEYED)
    if table == "lines":
        cursor.execute("delete from lines where line = %s", (str(_key(decide)),))
    else:
        cursor.execute(f"delete from {table} where id = %s", (_key(decide),))


def _keyless(cursor: Cursor, decide: random.Random) -> None:
    """Change one or all of several equal rows."""
    one = "ctid = (select min(ctid) from notes where id = %s)"
    key, note = decide.randint(0, 4), decide.choice(_NOTES)
    statement, values = decide.choice(
        [
            ("insert into notes values (%s, %s)", (key, note)),
            ("insert into notes select %s, %s from generate_series(1, 3)", (key, note)),
            (f"update notes set note = %s where {one}", (note, key)),
            (f"delete from notes where {one}", (key,)),
        ]
    )
    cursor.execute(statement, values)


def _bulk(cursor: Cursor, decide: random.Random) -> None:
    """Insert many rows in one statement, so that the transaction spans several batches."""
    statement = decide.choice(
        [
            "insert into notes select mod(i, 5), repeat('x', 200) from generate_series(1, 400) i",
            "delete from notes where id = %s",
            "update lines set quantity = %s",
            "update documents set title = %s",
            "delete from documents where id > %s",
        ]
    )
    cursor.execute(statement, (_key(decide) % 30,) if "%s" in statement else ())


def _message(cursor: Cursor, decide: random.Random) -> None:
    content = decide.choice(["", "text", "ü"])
    cursor.execute("select pg_logical_emit_message(true, 'random', %s)", (content,))
    # Without a transaction, the content is the identity of a message.
    content = f"{decide.random()}{'x' * decide.choice([0, 0, 9000])}"
    cursor.execute("select pg_logical_emit_message(false, 'at once', %s)", (content,))


def _truncate(cursor: Cursor, decide: random.Random) -> None:
    tables = decide.sample([*KEYED, KEYLESS], decide.randint(1, 2))
    cursor.execute(f"truncate {', '.join(tables)}")
