"""The workload of the capture and merge benchmarks: 800,000 row changes of an order book.

800,000 changes are 500,000 inserts into `orders` (about 220 bytes of text each, with text[], jsonb,
numeric and timestamps), 200,000 updates and 50,000 deletes of orders, and 20,000 inserts and 30,000
updates on `customers`, in transactions of 1,000. The server generates the rows by
`generate_series`, without a cost for the client, and with equal rows in each run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import psycopg2
import psycopg2.extensions

from benchmarks.scale import scaled

PUBLICATION = "benchmark"
TABLES = ("customers", "orders")
ORDERS_CHANGES_PER_UNIT = 750_000
CHANGES_PER_UNIT = 800_000
_TRANSACTION_ROWS = 1_000

_SCHEMA = """ create table customers ( id bigint primary key, name text not null, email text not
    null, balance numeric(12,2) not null, vip boolean not null, updated_at timestamptz not null );
    create table orders ( id bigint primary key, customer_id bigint not null, status text not null,
    amount numeric(12,2) not null, tags text[] not null, details jsonb not null, note text, quantity
    integer not null, ordered_at timestamp not null, updated_at timestamptz not null ); create
    publication benchmark for table customers, orders;
"""

_INSERT_ORDERS = """ insert into orders select i, mod(i, 20000), (array['new', 'paid', 'packed',
    'shipped'])[1 + mod(i, 4)], (mod(i, 100000)) / 100.0, array['web', 'tag' || mod(i, 50),
    md5(i::text)], jsonb_build_object('sku', mod(i, 5000), 'gift', mod(i, 7) = 0, 'coupon', 'SAVE'
    || mod(i, 90)), case when mod(i, 3) = 0 then null else 'left at the door of house ' || i end, 1
    + mod(i, 9), timestamp '2024-01-01' + i * interval '1 second', now() from
    generate_series(%(first)s, %(last)s) i
"""
_UPDATE_ORDERS = """
    update orders set status = 'delivered', amount = amount + 1, updated_at = now()
    where id between %(first)s and %(last)s
"""
_DELETE_ORDERS = "delete from orders where id between %(first)s and %(last)s"
_INSERT_CUSTOMERS = """
    insert into customers
    select i, 'customer ' || i, 'c' || i || '@example.com', i, mod(i, 10) = 0, now()
    from generate_series(%(first)s, %(last)s) i
"""
_UPDATE_CUSTOMERS = """
    update customers set balance = balance + 10, updated_at = now()
    where id between %(first)s and %(last)s
"""


def create_tables(conn: psycopg2.extensions.connection) -> None:
    """Create the two tables and the publication `benchmark` in an empty database."""
    with conn.cursor() as cursor:
        cursor.execute(_SCHEMA)


def run(
    conn: psycopg2.extensions.connection, changes: int = scaled(CHANGES_PER_UNIT, least=8_000)
) -> int:
    """Commit the workload and return the number of its row changes.

    Args:
        changes: number of changes; the shares of the parts are fixed.
    """
    scale = changes / CHANGES_PER_UNIT
    total = 0
    with conn.cursor() as cursor:
        for statement, rows in _parts():
            for first in range(1, int(rows * scale) + 1, _TRANSACTION_ROWS):
                last = min(first + _TRANSACTION_ROWS - 1, int(rows * scale))
                cursor.execute(statement, {"first": first, "last": last})
                total += cursor.rowcount
    return total


def insert_orders(conn: psycopg2.extensions.connection, first: int, last: int) -> None:
    """Insert the orders with these numbers in one transaction."""
    with conn.cursor() as cursor:
        cursor.execute(_INSERT_ORDERS, {"first": first, "last": last})


def run_one_transaction(conn: psycopg2.extensions.connection, rows: int) -> int:
    """Insert orders with numbers above the orders of `run` in one transaction."""
    with conn.cursor() as cursor:
        first = 1_000_000_000
        cursor.execute(_INSERT_ORDERS, {"first": first, "last": first + rows - 1})
        return cursor.rowcount


def run_side_by_side(conn: psycopg2.extensions.connection, transactions: int, rows: int) -> int:
    """Insert orders in transactions that are open at the same time, in turns of a tenth each.

    Args:
        rows: number of rows of each transaction.
    """
    with ExitStack() as held:
        writers = [
            held.enter_context(closing(psycopg2.connect(conn.dsn))) for _ in range(transactions)
        ]
        step = rows // 10
        for part in range(10):
            for number, writer in enumerate(writers):
                first = 1 + number * rows + part * step
                insert_orders(writer, first, first + step - 1)
        for writer in writers:
            writer.commit()
    return transactions * step * 10


def _parts() -> Iterator[tuple[str, int]]:
    yield _INSERT_CUSTOMERS, 20_000
    yield _INSERT_ORDERS, 500_000
    yield _UPDATE_ORDERS, 200_000
    yield _UPDATE_CUSTOMERS, 20_000
    yield _UPDATE_CUSTOMERS, 10_000
    yield _DELETE_ORDERS, 50_000
