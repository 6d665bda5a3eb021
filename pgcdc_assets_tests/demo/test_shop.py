"""The sample shop: its tables, its workload, and the process that runs the workload."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import psycopg2
import pytest

from pgcdc_assets.demo import shop
from pgcdc_assets.demo.actions import ACTIONS
from pgcdc_assets.demo.workload import Workload
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


@pytest.fixture
def shop_database(database: Database) -> Database:
    shop.create(database.conninfo, scale=0.05)
    return database


def connection_count(database: Database) -> int:
    """Return the number of the workload's open connections."""
    count: int = database.value(
        "select count(*) from pg_stat_activity where application_name ~ '^shop [0-9]' "
        "and datname = current_database()"
    )
    return count


def test_the_shop_has_keys_of_one_and_several_columns_and_columns_of_many_types(
    shop_database: Database,
) -> None:
    keys = dict(
        shop_database.query(
            "select conrelid::regclass::text, array_length(conkey, 1) from pg_constraint "
            "where contype = 'p' and connamespace = 'shop'::regnamespace"
        )
    )
    assert len(keys) == len(shop.tables(shop_database.conninfo)) == 6
    assert set(keys.values()) == {1, 2}
    types = shop_database.query(
        "select distinct format_type(atttypid, null) from pg_attribute "
        "where attrelid = any (array(select c.oid from pg_class c where c.relkind = 'r' "
        "and relnamespace = 'shop'::regnamespace)) and attnum > 0"
    )
    assert {name for (name,) in types} >= {
        *("text", "character varying", "numeric", "integer", "bigint", "boolean", "date", "uuid"),
        *("jsonb", "bytea", "integer[]", "text[]", "shop.order_status", "shop.quantity"),
        *("timestamp with time zone", "timestamp without time zone"),
    }


def test_every_table_has_rows_and_is_published(shop_database: Database) -> None:
    for table in shop.tables(shop_database.conninfo):
        assert shop_database.value(f"select count(*) from {table}") > 0


def test_a_failed_creation_of_the_shop_leaves_nothing(database: Database) -> None:
    database.execute("create type order_status as enum ()")
    database.execute("create publication shop")
    with pytest.raises(psycopg2.errors.DuplicateObject):
        shop.create(database.conninfo, scale=0.05)
    assert not shop.exists(database.conninfo)


def test_every_action_of_the_workload_succeeds(shop_database: Database) -> None:
    workload = Workload(shop_database.conninfo, transactions_per_second=2000, seed=3)
    wanted = {action.__name__ for action in ACTIONS} - {"give_up"} | {"rolled_back"}
    runner = threading.Thread(target=workload.run)
    runner.start()
    try:
        wait_until(lambda: wanted <= set(workload.counts), "every action to have run")
    finally:
        workload.stop()
        runner.join()
    assert workload.failure is None


def test_the_workload_sends_every_kind_of_change(shop_database: Database) -> None:
    shop_database.query("select pg_create_logical_replication_slot('peek', 'pgoutput')")
    kinds: set[str] = set()

    def seen_all() -> bool:
        part = Workload(shop_database.conninfo, transactions_per_second=2000, seed=len(kinds))
        part.run(0.5)
        rows = shop_database.query(
            "select distinct chr(get_byte(data, 0)) from pg_logical_slot_get_binary_changes("
            "'peek', null, null, 'proto_version', '1', 'publication_names', 'shop')"
        )
        kinds.update(kind for (kind,) in rows)
        return kinds >= set("BCRIUDT")

    wait_until(seen_all, "all kinds of messages")


def test_the_child_process_ends_at_sigterm_and_reports_its_work(shop_database: Database) -> None:
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "pgcdc_assets.demo.workload"),
            *("--conninfo", shop_database.conninfo, "--rate", "500"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: connection_count(shop_database) == 4, "four connections")
        child.send_signal(signal.SIGTERM)
        output, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 0
    assert sum(json.loads(output).values()) >= 4


def test_the_child_process_ends_when_its_parent_has_ended(shop_database: Database) -> None:
    program = (
        "import subprocess, sys; "
        "subprocess.Popen([sys.executable, '-m', 'pgcdc_assets.demo.workload', "
        "'--conninfo', sys.argv[1]]); input()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, shop_database.conninfo],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )

    wait_until(lambda: connection_count(shop_database) == 4, "the workload to begin")
    parent.kill()
    parent.communicate()
    wait_until(lambda: connection_count(shop_database) == 0, "the workload to end")
