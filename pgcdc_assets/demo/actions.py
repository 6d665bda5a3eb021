"""The actions of the shop's customers and staff: each action is one transaction.

The actions make every kind of change: inserts, deletes, a delete and an insert under one key,
TRUNCATE, and rollbacks of a whole transaction or to a savepoint. Some updates change a key, some
change nothing, and some do not change a long text, which Postgres then does not send.
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
    """Raised by an action to roll back what it has written."""


def _pick(cursor: Cursor, chance: random.Random, table: str, key: str) -> object | None:
    """Return the key of a random row of a small table; None if the table is empty."""
    query = sql.SQL(
        "select {key} from shop.{table} "
        "offset floor(%s * (select count(*) from shop.{table})) limit 1"
    ).format(key=sql.Identifier(key), table=sql.Identifier(table))
    cursor.execute(query, (chance.random(),))
    row = cursor.fetchone()
    return row[0] if row else None


def _pick_order(cursor: Cursor, chance: random.Random) -> object | None:
    """Return the id of a random order; recent orders are more frequent."""
    cursor.execute(
        "select id from shop.orders where id <= (select max(id) from shop.orders) - %s "
        "order by id desc limit 1",
        (int(chance.expovariate(1 / 500)),),
    )
    row = cursor.fetchone()
    return row[0] if row else None


def place_order(cursor: Cursor, chance: random.Random) -> None:
    """Insert an order of one to five lines, and reserve its stock."""
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
    """Delete an order and its lines."""
    cursor.execute("delete from shop.orders where id = %s", (_pick_order(cursor, chance),))


def sign_up(cursor: Cursor, chance: random.Random) -> None:
    """Insert a customer."""
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
    """Update a customer's last visit; some of the updates change nothing."""
    cursor.execute(
        "update shop.customers set last_seen = case when %s then last_seen else localtimestamp end,"
        " is_active = %s where id = %s",
        (chance.random() < 0.2, True, _pick(cursor, chance, "customers", "id")),
    )


def fill_cart(cursor: Cursor, chance: random.Random) -> None:
    """Insert, update or delete a cart."""
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
    """Update a price; Postgres does not send the unchanged long description."""
    cursor.execute(
        "update shop.products set price = round(price * %s + 0.01, 2) where sku = %s",
        (chance.choice([0.9, 1.1]), _pick(cursor, chance, "products", "sku")),
    )


def rewrite_description(cursor: Cursor, chance: random.Random) -> None:
    """Update a long description, then another column of the row in the same transaction."""
    sku = _pick(cursor, chance, "products", "sku")
    text = " ".join(f"{chance.randrange(10**12):012d}" for _ in range(chance.choice([20, 400])))
    cursor.execute("update shop.products set description = %s where sku = %s", (text, sku))
    cursor.execute(
        "update shop.products set is_available = not is_available where sku = %s", (sku,)
    )


def rename_product(cursor: Cursor, chance: random.Random) -> None:
    """Update a product's key, which also updates the keys of its inventory."""
    cursor.execute(
        "update shop.products set sku = %s where sku = %s",
        (f"NEW-{chance.randrange(10**9):09d}", _pick(cursor, chance, "products", "sku")),
    )


def recount(cursor: Cursor, chance: random.Random) -> None:
    """Update the stock of one product in all warehouses."""
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
    """Swap the composite keys of two rows through a third key."""
    sku = _pick(cursor, chance, "products", "sku")
    for old, new in (("north", "moving"), ("south", "north"), ("moving", "south")):
        cursor.execute(
            "update shop.inventory set warehouse = %s where warehouse = %s and sku = %s",
            (new, old, sku),
        )


def replace_stock(cursor: Cursor, chance: random.Random) -> None:
    """Delete a row and insert another row under its key."""
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
    """Roll back a part of a transaction to a savepoint, and commit the rest."""
    sign_up(cursor, chance)
    cursor.execute("savepoint second_thoughts")
    place_order(cursor, chance)
    cursor.execute("rollback to savepoint second_thoughts")
    visit(cursor, chance)


def give_up(cursor: Cursor, chance: random.Random) -> None:
    """Roll back a whole transaction."""
    place_order(cursor, chance)
    cancel_order(cursor, chance)
    raise RolledBack


def raise_all_prices(cursor: Cursor, chance: random.Random) -> None:
    """Update a tenth of the products in one statement."""
    cursor.execute(
        "update shop.products set price = price + 0.01 where hashtext(sku) %% 10 = %s",
        (chance.randrange(10),),
    )


def clear_carts(cursor: Cursor, chance: random.Random) -> None:
    """Truncate all carts, and insert one cart in the same transaction."""
    cursor.execute("truncate shop.carts")
    cursor.execute(
        "insert into shop.carts (customer_id) values (%s)",
        (_pick(cursor, chance, "customers", "id"),),
    )


# The relative frequency of each action.
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
