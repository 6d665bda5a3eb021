"""Random DDL steps on one table.

A step returns false if it finds nothing to change. A step that needs several transactions commits
them itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from psycopg2 import sql
from psycopg2.errors import DeadlockDetected, LockNotAvailable
from psycopg2.extensions import cursor as Cursor

from pgcdc_assets_tests.support.convergence.history_audit import audit_table
from pgcdc_assets_tests.support.convergence.row_writer import TableColumn

PUBLICATION = "pub"
# `id` is unique at any time, so rows have one name in the audit under each key.
_FIXED = ("id", "k", "v")
_KEYS = ("id", "id, k", "k, id")
_FREE_NAMES = ("a", "b", "c", "d", "e", "A b", 'q"')
_TYPES = ("smallint", "integer", "varchar(8)", "numeric(8,2)", "real", "date", "text", "boolean")
_WIDER = {
    "smallint": "integer",
    "integer": "bigint",
    "real": "double precision",
    "date": "timestamp",
    "numeric(8,2)": "numeric(12,4)",
    "character varying(8)": "varchar(20)",
    "character varying(10)": "text",
}
_NARROWER = {
    "bigint": "integer using ({}::bigint % 1000)::int",
    "integer": "smallint using ({} % 900)::smallint",
    "text": "varchar(8) using left({}, 8)",
    "timestamp without time zone": "date using {}::date",
}


@dataclass(frozen=True)
class Target:
    """The table of a DDL step.

    Attributes:
        name: the declared name.
        table: the current name.
    """

    name: str
    table: sql.Identifier
    columns: list[TableColumn]

    def free_name(self, decide: random.Random) -> str | None:
        """Return an unused name of a column."""
        used = {column.name for column in self.columns}
        free = [name for name in _FREE_NAMES if name not in used]
        return decide.choice(free) if free else None

    def choose(self, decide: random.Random, count: int = 1) -> list[TableColumn]:
        """Choose columns that no other step needs; an empty list if there are too few."""
        others = [column for column in self.columns if column.name not in _FIXED]
        return decide.sample(others, count) if len(others) >= count else []


def add_nullable(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    return _add(cursor, decide, target, decide.choice(_TYPES))


def add_with_default(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    kind = decide.choice(["int default 5", "text default 'x y'", "numeric(8,2) default 1.25"])
    return _add(cursor, decide, target, kind)


def add_with_volatile_default(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    return _add(cursor, decide, target, "text default md5(random()::text)")


def add_identity(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    if any(not column.is_written for column in target.columns):
        return False
    return _add(cursor, decide, target, "bigint generated always as identity")


def _add(cursor: Cursor, decide: random.Random, target: Target, kind: str) -> bool:
    name = target.free_name(decide)
    if name is None:
        return False
    _alter(cursor, target, "add column {} " + kind, sql.Identifier(name))
    return True


def drop(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    for column in target.choose(decide):
        _alter(cursor, target, "drop column {}", sql.Identifier(column.name))
        return True
    return False


def drop_and_add(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    for column in target.choose(decide):
        name = sql.Identifier(column.name)
        _alter(cursor, target, "drop column {}, add column {} " + decide.choice(_TYPES), name, name)
        return True
    return False


def rename(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    name = target.free_name(decide)
    for column in target.choose(decide):
        if name is not None:
            _rename(cursor, target, column.name, name)
            return True
    return False


def swap_names(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Swap the names of two columns in one transaction."""
    chosen = target.choose(decide, 2)
    if not chosen:
        return False
    one, other = chosen
    for old, new in ((one.name, "aside"), (other.name, one.name), ("aside", other.name)):
        _rename(cursor, target, old, new)
    return True


def widen(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    return _retype(cursor, decide, target, _WIDER)


def narrow(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    return _retype(cursor, decide, target, _NARROWER)


def _retype(
    cursor: Cursor, decide: random.Random, target: Target, types: Mapping[str, str]
) -> bool:
    fitting = [
        column
        for column in target.columns
        if column.type in types and column.is_written and column.name not in _FIXED
    ]
    if not fitting:
        return False
    column = decide.choice(fitting)
    name = sql.Identifier(column.name)
    change = sql.SQL(types[column.type]).format(name)
    cursor.execute(
        sql.SQL("alter table {} alter column {} drop default, alter column {} type {}").format(
            target.table, name, name, change
        )
    )
    return True


def change_nothing(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Run DDL that changes no value."""
    if decide.random() < 0.3:
        cursor.execute(sql.SQL("comment on table {} is 'a comment'").format(target.table))
        return True
    change = decide.choice(
        [
            "alter column v set default 'x'",
            "alter column v drop default",
            "alter column v set statistics 5",
        ]
    )
    _alter(cursor, target, change)
    return True


def alter_and_back(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Alter the table, insert a row, and alter the table back in one transaction."""
    _alter(cursor, target, "add column passing int default 7")
    cursor.execute(
        sql.SQL("insert into {} (id, v) values (%s, 'between') on conflict do nothing").format(
            target.table
        ),
        (decide.randint(100, 120),),
    )
    _alter(cursor, target, "drop column passing")
    return True


def change_identity(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    identity = decide.choice(["full", "default", "using index {}"])
    _alter(cursor, target, f"replica identity {identity}", _unique_index(cursor, target))
    return True


def recreate_key(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Drop the primary key, and add it again, in one transaction."""
    name, columns = _primary_key(cursor, target)
    change = f"drop constraint {{}}, add primary key ({columns})"
    _alter(cursor, target, change, sql.Identifier(name))
    return True


def change_key(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Add, remove or reorder columns of the primary key in one transaction."""
    name, columns = _primary_key(cursor, target)
    others = decide.choice([key for key in _KEYS if key != columns])
    change = f"drop constraint {{}}, add primary key ({others})"
    _alter(cursor, target, change, sql.Identifier(name))
    return True


def lose_key(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Drop the primary key, and add it again in a later transaction."""
    name, columns = _primary_key(cursor, target)
    _alter(cursor, target, "drop constraint {}", sql.Identifier(name))
    cursor.connection.commit()
    time.sleep(decide.random() * 0.3)
    while True:
        try:
            _alter(cursor, target, f"add primary key ({columns})")
            cursor.connection.commit()
            return True
        except (DeadlockDetected, LockNotAvailable):
            cursor.connection.rollback()


def _primary_key(cursor: Cursor, target: Target) -> tuple[str, str]:
    """Return the name and the columns of the primary key."""
    cursor.execute(
        "select c.conname, string_agg(a.attname, ', ' order by k.place) "
        "from pg_constraint c cross join unnest(c.conkey) with ordinality k(attnum, place) "
        "join pg_attribute a on a.attrelid = c.conrelid and a.attnum = k.attnum "
        "where c.conrelid = %s::regclass and c.contype = 'p' group by c.conname",
        (target.table.as_string(cursor),),
    )
    ((name, columns),) = cursor.fetchall()
    return name, columns


def _unique_index(cursor: Cursor, target: Target) -> sql.Identifier:
    """Return the unique index of `id` that is no primary key."""
    cursor.execute(
        "select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid "
        "where i.indrelid = %s::regclass and i.indisunique and not i.indisprimary",
        (target.table.as_string(cursor),),
    )
    ((name,),) = cursor.fetchall()
    return sql.Identifier(name)


def rename_table(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Rename a table, or restore the declared name."""
    current = target.table.strings[-1]
    name = f"{target.name}_moved" if current == target.name else target.name
    _alter(cursor, target, "rename to {}", sql.Identifier(name))
    return True


def move_table(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Move a table to another schema, or back."""
    schema = "elsewhere" if target.table.strings[0] == "public" else "public"
    _alter(cursor, target, "set schema {}", sql.Identifier(schema))
    return True


def create_again(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Drop a table, create another table with the declared name, and publish it."""
    cursor.execute(sql.SQL("drop table {}").format(target.table))
    name = sql.Identifier("public", target.name)
    cursor.execute(
        sql.SQL(
            "create table {} (id int primary key, v text, k int not null default 0, e int); "
            "create unique index on {} (id)"
        ).format(name, name)
    )
    audit_table(cursor, name, target.name)
    cursor.execute(
        sql.SQL("insert into {} select i, 'again', 0, i from generate_series(1, 5) i").format(name)
    )
    cursor.execute(sql.SQL(f"alter publication {PUBLICATION} add table {{}}").format(name))
    return True


def leave_and_return(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Remove a table from the publication, update rows, and publish the table again."""
    publication = f"alter publication {PUBLICATION}"
    cursor.execute(sql.SQL(publication + " drop table {}").format(target.table))
    cursor.connection.commit()
    cursor.execute(
        sql.SQL("update {} set v = 'unpublished' where id = %s").format(target.table),
        (decide.randint(1, 20),),
    )
    cursor.connection.commit()
    cursor.execute(sql.SQL(publication + " add table {}").format(target.table))
    # The transaction must not be rolled back, or the table would remain unpublished.
    cursor.connection.commit()
    return True


def change_unused_partition(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Attach a new table as a partition ahead of its first row, or drop or detach it."""
    cursor.execute("select relispartition from pg_class where oid = to_regclass('public.events_3')")
    found = cursor.fetchone()
    if found is None:
        cursor.execute("create table events_3 (like events including all)")
    elif found[0]:
        ends = ["drop table events_3", "alter table events detach partition events_3"]
        cursor.execute(decide.choice(ends))
        return True
    cursor.execute("alter table events attach partition events_3 for values in (3)")
    return True


def change_partitions(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Attach a filled table as a partition, or detach it."""
    cursor.execute("select relispartition from pg_class where oid = to_regclass('public.events_2')")
    found = cursor.fetchone()
    if found is None:
        cursor.execute("create table events_2 (like events including all)")
        cursor.execute("insert into events_2 select i, 'before', i, 2 from generate_series(1, 9) i")
    elif found[0]:
        cursor.execute("alter table events detach partition events_2")
        return True
    cursor.execute("alter table events attach partition events_2 for values in (2)")
    return True


def change_unsent_rows(cursor: Cursor, decide: random.Random, target: Target) -> bool:
    """Truncate a partition, or update it while it is unlogged: Postgres sends neither."""
    leaf = f"events_{decide.randrange(2)}"
    if decide.random() < 0.5:
        cursor.execute(f"truncate {leaf}")
        return True
    cursor.execute(f"alter table {leaf} set unlogged; update {leaf} set v = 'unlogged'")
    cursor.execute(f"alter table {leaf} set logged")
    return True


# The relative frequency of each step.
STEPS: dict[Callable[[Cursor, random.Random, Target], bool], float] = {
    add_nullable: 10,
    add_with_default: 8,
    add_with_volatile_default: 1,
    add_identity: 1,
    drop: 8,
    drop_and_add: 5,
    rename: 8,
    swap_names: 5,
    widen: 8,
    narrow: 1,
    change_nothing: 4,
    alter_and_back: 4,
    change_identity: 2,
    recreate_key: 1,
    change_key: 2,
    lose_key: 1,
    rename_table: 2,
    move_table: 2,
    create_again: 1,
    leave_and_return: 1,
    change_partitions: 1,
    change_unused_partition: 1,
    change_unsent_rows: 1,
}

# Steps after which a table may need a new snapshot.
DISRUPTIVE = tuple(
    step.__name__
    for step in (
        add_with_volatile_default,
        add_identity,
        narrow,
        alter_and_back,
        change_identity,
        change_key,
        lose_key,
        create_again,
        leave_and_return,
        change_partitions,
        change_unused_partition,
        change_unsent_rows,
    )
)


def _alter(cursor: Cursor, target: Target, change: str, *names: sql.Identifier) -> None:
    statement = sql.SQL("alter table {} ").format(target.table) + sql.SQL(change).format(*names)
    cursor.execute(statement)


def _rename(cursor: Cursor, target: Target, old: str, new: str) -> None:
    _alter(cursor, target, "rename column {} to {}", sql.Identifier(old), sql.Identifier(new))
