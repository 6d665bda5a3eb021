"""The shop's customers and staff: transactions of every kind, from several connections at once.

Run as a child process (`python -m pgcdc_assets.demo.workload`), so that it neither slows the
pipeline down nor is slowed by it. It ends after the transactions under way at SIGTERM or SIGINT, or
when its parent is gone, and prints how many of each kind it committed.

Each action is one transaction and chooses its rows by itself. Collisions between connections
(deadlocks, a row that another one has just deleted) are part of the picture: they are counted and
rolled back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg2
from psycopg2 import sql

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

Action = Callable[["Cursor", random.Random], None]


class _RolledBack(Exception):
    """Raised by an action that changes its mind after it has written."""


def _pick(cursor: Cursor, chance: random.Random, table: str, key: str) -> object | None:
    """Choose a row of a small table by its place in key order; None when the table is empty."""
    query = sql.SQL(
        "select {key} from shop.{table} "
        "offset floor(%s * (select count(*) from shop.{table})) limit 1"
    ).format(key=sql.Identifier(key), table=sql.Identifier(table))
    cursor.execute(query, (chance.random(),))
    row = cursor.fetchone()
    return row[0] if row else None


def _pick_order(cursor: Cursor, chance: random.Random) -> object | None:
    """Choose an order by its number, recent ones more often."""
    cursor.execute(
        "select id from shop.orders where id <= (select max(id) from shop.orders) - %s "
        "order by id desc limit 1",
        (int(chance.expovariate(1 / 500)),),
    )
    row = cursor.fetchone()
    return row[0] if row else None


def place_order(cursor: Cursor, chance: random.Random) -> None:
    """An order of one to five lines, its stock reserved."""
    cursor.execute(
        "insert into shop.orders (customer_id, coupons, deliver_on, note) "
        "select %s, %s, current_date + %s, %s returning id",
        (
            _pick(cursor, chance, "customers", "id"),
            chance.choice([None, [], ["SPRING"], ["TEN", None, 'with "quotes"']]),
            chance.randrange(1, 30),
            chance.choice([None, "", "Leave at the door", "Tab\tand\nline"]),
        ),
    )
    order = cursor.fetchone()
    for line in range(1, chance.randrange(2, 7)):
        sku = _pick(cursor, chance, "products", "sku")
        cursor.execute(
            "insert into shop.order_items (order_id, line_no, sku, quantity, unit_price, options) "
            "select %s, %s, sku, %s, price, %s from shop.products where sku = %s",
            (
                order,
                line,
                chance.randrange(1, 5),
                chance.choice([None, '{"gift": true}', '{"note": "größer", "n": [1, 2.50]}']),
                sku,
            ),
        )
        cursor.execute(
            "update shop.inventory set reserved = reserved + 1 where warehouse = %s and sku = %s",
            (chance.choice(["north", "south", "harbour"]), sku),
        )
    cursor.execute(
        "update shop.orders set total = (select coalesce(sum(quantity * unit_price), 0) "
        "from shop.order_items where order_id = id) where id = %s",
        (order,),
    )


def advance_order(cursor: Cursor, chance: random.Random) -> None:
    """An order goes on to its next state."""
    cursor.execute(
        "update shop.orders set status = (enum_range(status, null))"
        "[least(2, array_length(enum_range(status, null), 1))] where id = %s",
        (_pick_order(cursor, chance),),
    )


def cancel_order(cursor: Cursor, chance: random.Random) -> None:
    """An order and its lines are deleted."""
    cursor.execute("delete from shop.orders where id = %s", (_pick_order(cursor, chance),))


def sign_up(cursor: Cursor, chance: random.Random) -> None:
    """A new customer."""
    cursor.execute(
        "insert into shop.customers (name, email, tags, preferences, last_seen) "
        "values (%s, %s, %s, %s, localtimestamp)",
        (
            f"New customer {chance.randrange(10**6)}",
            f"new{chance.randrange(10**9)}@example.com",
            chance.choice([[], ["new"], ["new", "a,b", "{braces}"]]),
            '{"language": "fr", "big": 12345678901234567890}',
        ),
    )


def visit(cursor: Cursor, chance: random.Random) -> None:
    """A customer comes by: a small update, and sometimes one that changes nothing."""
    cursor.execute(
        "update shop.customers set last_seen = case when %s then last_seen else localtimestamp end,"
        " is_active = %s where id = %s",
        (chance.random() < 0.2, True, _pick(cursor, chance, "customers", "id")),
    )


def fill_cart(cursor: Cursor, chance: random.Random) -> None:
    """A cart is opened, changed or left."""
    if chance.random() < 0.5:
        cursor.execute(
            "insert into shop.carts (customer_id, contents) values (%s, %s)",
            (_pick(cursor, chance, "customers", "id"), '[{"sku": 1, "quantity": 2}]'),
        )
    elif chance.random() < 0.5:
        cursor.execute(
            "update shop.carts set contents = contents || '[{\"sku\": 2}]', "
            "touched_at = localtimestamp where session = %s",
            (_pick(cursor, chance, "carts", "session"),),
        )
    else:
        cursor.execute(
            "delete from shop.carts where session = %s",
            (_pick(cursor, chance, "carts", "session"),),
        )


def change_price(cursor: Cursor, chance: random.Random) -> None:
    """A price changes; the long description, stored out of line, is not sent."""
    cursor.execute(
        "update shop.products set price = round(price * %s + 0.01, 2) where sku = %s",
        (chance.choice([0.9, 1.1]), _pick(cursor, chance, "products", "sku")),
    )


def rewrite_description(cursor: Cursor, chance: random.Random) -> None:
    """A long description is rewritten, and the row touched again in the same transaction."""
    sku = _pick(cursor, chance, "products", "sku")
    text = " ".join(f"{chance.randrange(10**12):012d}" for _ in range(chance.choice([20, 400])))
    cursor.execute("update shop.products set description = %s where sku = %s", (text, sku))
    cursor.execute(
        "update shop.products set is_available = not is_available where sku = %s", (sku,)
    )


def rename_product(cursor: Cursor, chance: random.Random) -> None:
    """A product's key changes, and with it the keys of its inventory."""
    cursor.execute(
        "update shop.products set sku = %s where sku = %s",
        (f"NEW-{chance.randrange(10**9):09d}", _pick(cursor, chance, "products", "sku")),
    )


def recount(cursor: Cursor, chance: random.Random) -> None:
    """The shelves of one product are counted in all warehouses."""
    cursor.execute(
        "update shop.inventory set on_hand = %s, reserved = 0, counted_at = now(), "
        "bins = bins || %s where sku = %s",
        (
            chance.randrange(500),
            [chance.randrange(40)],
            _pick(cursor, chance, "products", "sku"),
        ),
    )


def swap_warehouses(cursor: Cursor, chance: random.Random) -> None:
    """Two rows exchange their composite keys, by way of a third key."""
    sku = _pick(cursor, chance, "products", "sku")
    for old, new in (("north", "moving"), ("south", "north"), ("moving", "south")):
        cursor.execute(
            "update shop.inventory set warehouse = %s where warehouse = %s and sku = %s",
            (new, old, sku),
        )


def replace_stock(cursor: Cursor, chance: random.Random) -> None:
    """A row is deleted and inserted again under the same key."""
    cursor.execute(
        "delete from shop.inventory where warehouse = 'harbour' and sku = %s "
        "returning warehouse, sku",
        (_pick(cursor, chance, "products", "sku"),),
    )
    row = cursor.fetchone()
    if row is not None:
        cursor.execute(
            "insert into shop.inventory (warehouse, sku, on_hand) values (%s, %s, %s)",
            (*row, chance.randrange(100)),
        )


def think_twice(cursor: Cursor, chance: random.Random) -> None:
    """Part of a transaction is rolled back to a savepoint, and the rest is committed."""
    sign_up(cursor, chance)
    cursor.execute("savepoint second_thoughts")
    place_order(cursor, chance)
    cursor.execute("rollback to savepoint second_thoughts")
    visit(cursor, chance)


def give_up(cursor: Cursor, chance: random.Random) -> None:
    """A whole transaction is rolled back."""
    place_order(cursor, chance)
    cancel_order(cursor, chance)
    raise _RolledBack


def raise_all_prices(cursor: Cursor, chance: random.Random) -> None:
    """A tenth of the products in one statement."""
    cursor.execute(
        "update shop.products set price = price + 0.01 where hashtext(sku) %% 10 = %s",
        (chance.randrange(10),),
    )


def clear_carts(cursor: Cursor, chance: random.Random) -> None:
    """All carts are truncated, and one is opened in the same transaction."""
    cursor.execute("truncate shop.carts")
    cursor.execute(
        "insert into shop.carts (customer_id) values (%s)",
        (_pick(cursor, chance, "customers", "id"),),
    )


# How often each action is chosen, out of their sum.
ACTIONS: dict[Action, float] = {
    place_order: 30,
    advance_order: 20,
    visit: 12,
    fill_cart: 10,
    change_price: 8,
    cancel_order: 5,
    sign_up: 5,
    recount: 4,
    rewrite_description: 2,
    swap_warehouses: 2,
    replace_stock: 2,
    rename_product: 1.5,
    think_twice: 1.5,
    give_up: 1.5,
    raise_all_prices: 0.3,
    clear_carts: 0.3,
}


class Workload:
    """Runs actions from several connections until stopped.

    Args:
        conninfo: the shop's database.
        connection_count: transactions that may be open at once.
        transactions_per_second: of all connections together.
        seed: makes the choices of each connection repeatable; not their interleaving.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        connection_count: int = 4,
        transactions_per_second: float = 50,
        seed: int = 1,
    ) -> None:
        self._conninfo = conninfo
        self._connection_count = connection_count
        self._pause_seconds = connection_count / transactions_per_second
        self._seed = seed
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self.failure: Exception | None = None
        self.counts: Counter[str] = Counter()

    def run(self, seconds: float | None = None) -> Counter[str]:
        """Run for a time, or until `stop` is called; return how often each action was committed.

        A connection that fails with something else than a collision ends the run, and its error is
        left in `failure`.
        """
        workers = [
            threading.Thread(target=self._work, args=(number,), name=f"shop {number}", daemon=True)
            for number in range(self._connection_count)
        ]
        for worker in workers:
            worker.start()
        self._stopping.wait(seconds)
        self.stop()
        for worker in workers:
            worker.join()
        return self.counts

    def stop(self) -> None:
        """End after the transactions under way."""
        self._stopping.set()

    def _work(self, number: int) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        try:
            with closing(
                psycopg2.connect(self._conninfo, application_name=f"shop {number}")
            ) as connection:
                due = time.monotonic()
                while not self._stopping.is_set():
                    action = chance.choices(list(ACTIONS), list(ACTIONS.values()))[0]
                    self._count(_attempt(connection, action, chance))
                    # A late worker does not catch up by a burst of more than a second's work.
                    due = max(due + self._pause_seconds, time.monotonic() - 1)
                    self._stopping.wait(max(0.0, due - time.monotonic()))
        except psycopg2.Error as error:
            self.failure = error
            self.stop()

    def _count(self, name: str) -> None:
        with self._guard:
            self.counts[name] += 1


def _attempt(
    connection: psycopg2.extensions.connection, action: Action, chance: random.Random
) -> str:
    """Run one action as one transaction; return its name, or how it ended otherwise."""
    with connection.cursor() as cursor:
        try:
            action(cursor, chance)
            connection.commit()
        except _RolledBack:
            connection.rollback()
            return "rolled_back"
        except (psycopg2.errors.DeadlockDetected, psycopg2.IntegrityError):
            connection.rollback()
            return "collided"
    return action.__name__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; print the counts as JSON at the end."""
    parser = argparse.ArgumentParser(
        prog="python -m pgcdc_assets.demo.workload", description=__doc__
    )
    parser.add_argument("--conninfo", required=True, help="the shop's database")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--rate", type=float, default=50, help="transactions per second in all")
    parser.add_argument("--seconds", type=float, help="how long; until SIGTERM when not given")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    workload = Workload(
        options.conninfo,
        connection_count=options.connections,
        transactions_per_second=options.rate,
        seed=options.seed,
    )
    # Signals are waited for and not handled: a handler may not touch the events of other threads.
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    runner = threading.Thread(target=workload.run, args=(options.seconds,), name="workload")
    runner.start()
    parent = os.getppid()
    while runner.is_alive() and os.getppid() == parent:
        if signal.sigtimedwait(stop_signals, 0.2) is not None:
            break
    workload.stop()
    runner.join()
    print(json.dumps(dict(workload.counts)), flush=True)
    if workload.failure is not None:
        print(f"the workload ended: {workload.failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
