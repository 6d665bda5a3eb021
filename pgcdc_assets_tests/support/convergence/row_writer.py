"""Random row changes for tables whose columns change at any time.

A transaction reads the columns of its table from the catalog, and then writes. If DDL of another
connection occurs in between, the transaction fails and is rolled back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import cursor as Cursor

KEYS = 30

EXPECTED = (
    psycopg2.errors.UniqueViolation,
    psycopg2.errors.NotNullViolation,
    psycopg2.errors.CheckViolation,
    psycopg2.errors.DeadlockDetected,
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.UndefinedColumn,
    psycopg2.errors.UndefinedTable,
    psycopg2.errors.UndefinedObject,
    psycopg2.errors.DatatypeMismatch,
    psycopg2.errors.NumericValueOutOfRange,
    psycopg2.errors.StringDataRightTruncation,
    psycopg2.errors.InvalidTextRepresentation,
    psycopg2.errors.GeneratedAlways,
    psycopg2.errors.ObjectNotInPrerequisiteState,
    psycopg2.errors.InternalError_,
)

_COLUMNS = """
select attname, format_type(atttypid, atttypmod), attgenerated::text, attidentity::text
  from pg_attribute
 where attrelid = %s::oid and attnum > 0 and not attisdropped
 order by attnum
"""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table as the catalog describes it.

    Attributes:
        type: the type with its modifier, such as `character varying(10)`.
        is_written: a statement may give the column a value.
    """

    name: str
    type: str
    is_written: bool


def read_columns(cursor: Cursor, relation_id: int) -> list[TableColumn]:
    """Read the columns of a table in the order of their attribute numbers."""
    cursor.execute(_COLUMNS, (relation_id,))
    return [
        TableColumn(name, type_name, not generated and not identity)
        for name, type_name, generated, identity in cursor.fetchall()
    ]


def read_name(cursor: Cursor, relation_id: int) -> sql.Identifier | None:
    """Return the current name of a table; None if the table was dropped."""
    cursor.execute(
        "select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = relnamespace "
        "where c.oid = %s::oid",
        (relation_id,),
    )
    row = cursor.fetchone()
    return None if row is None else sql.Identifier(*row)


def random_text(type_name: str, decide: random.Random) -> str | None:
    """Return the text of a random value of a type, or None for NULL."""
    if decide.random() < 0.15:
        return None
    base = type_name.split("(")[0]
    match base:
        case "smallint" | "integer" | "bigint":
            return str(decide.randint(-900, 900))
        case "numeric" | "real" | "double precision":
            return f"{decide.randint(-900, 900)}.{decide.choice(['25', '5', '75'])}"
        case "date":
            return f"20{decide.randint(10, 60)}-0{decide.randint(1, 9)}-1{decide.randint(0, 9)}"
        case "timestamp without time zone":
            return f"20{decide.randint(10, 60)}-01-02 03:04:0{decide.randint(0, 9)}.5"
        case "boolean":
            return decide.choice(["true", "false"])
        case "text" if decide.random() < 0.3:
            # Postgres stores this text out of line, and omits it from updates of other columns.
            return decide.randbytes(3000).hex()
        case _:
            return decide.choice(["", "a", "ü€", "x y", "q'\""])


def write_rows(cursor: Cursor, decide: random.Random, relation_ids: Sequence[int]) -> None:
    """Run one to six random statements on random tables."""
    for _ in range(decide.choice([1, 1, 2, 3, 6])):
        relation_id = decide.choice(relation_ids)
        name = read_name(cursor, relation_id)
        if name is not None:
            _write(cursor, decide, name, read_columns(cursor, relation_id))


def _write(
    cursor: Cursor, decide: random.Random, name: sql.Identifier, columns: list[TableColumn]
) -> None:
    written = [column for column in columns if column.is_written and column.name != "id"]
    key = decide.randint(1, KEYS)
    action = decide.choices(["insert", "update", "delete", "key"], [5, 7, 2, 1])[0]
    parameters: list[Any] = []
    if action == "insert" or not written:
        names = [sql.Identifier("id"), *(sql.Identifier(column.name) for column in written)]
        places: list[sql.Composable] = [sql.SQL("%s::int")]
        parameters.append(key)
        for column in written:
            places.append(sql.SQL("%s::{}").format(sql.SQL(column.type)))
            parameters.append(random_text(column.type, decide))
        statement = sql.SQL("insert into {} ({}) values ({}) on conflict do nothing").format(
            name, sql.SQL(", ").join(names), sql.SQL(", ").join(places)
        )
    elif action == "update":
        column = decide.choice(written)
        parameters += [random_text(column.type, decide), key]
        statement = sql.SQL("update {} set {} = %s::{} where id = %s").format(
            name, sql.Identifier(column.name), sql.SQL(column.type)
        )
    elif action == "delete":
        parameters.append(key)
        statement = sql.SQL("delete from {} where id = %s").format(name)
    else:
        parameters += [decide.randint(1, KEYS), key]
        statement = sql.SQL("update {} set id = %s where id = %s").format(name)
    cursor.execute(statement, parameters)
