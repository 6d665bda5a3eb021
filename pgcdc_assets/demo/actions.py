"""What the shop's customers and staff do: each action is a transaction that chooses its own rows.

Between them they make every kind of change: inserts, updates (of keys too, of rows whose long text
is stored out of line and not sent, and such that change nothing), deletes, a delete and an insert
under one key, a truncate now and then, and rollbacks of a whole transaction and of a part.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from psycopg2 import sql

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

Action = Callable[["Cursor", random.Random], None]


class RolledBack(Exception):
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
    """Advance an order to its next state."""
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
    raise RolledBack


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
