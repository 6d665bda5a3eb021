"""Transactions that the server sends before they are visible: the commit waits for a standby."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.catalog import visible_transactions
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import Database, create_database
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

_SCHEMA = ["create table t (id int primary key, a int)", "create table u (id int primary key)"]
_ALTER = "alter table t rename a to b; alter table t add a int; insert into t values (1, 9, 8)"
_REPLACE = "alter table t drop a; alter table t add a int; insert into t values (1, 9)"


@pytest.fixture
def begun(own_server: EmbeddedServer, zone: RawZone) -> Capturing:
    """Return a capture of a server of its own, whose catalog was polled."""
    own_server.start()
    database = create_database(own_server)
    slot = f"s_{database.name}"
    capturing = Capturing(database, zone, slot, database.conninfo).begin(*_SCHEMA)
    poll(capturing)
    return capturing


@contextlib.contextmanager
def _waiting_commit(database: Database, statements: str) -> Iterator[Lsn]:
    """Hold a commit, whose record is flushed, for the block; yield the end of its WAL."""

    def execute() -> None:
        database.transaction("set local synchronous_commit = on", statements)

    def waits() -> bool:
        return bool(
            database.value("select count(*) from pg_stat_activity where wait_event = 'SyncRep'")
        )

    writer = threading.Thread(target=execute)
    database.execute("alter system set synchronous_standby_names = 'none'")
    database.value("select pg_reload_conf()")
    wait_until(lambda: database.value("show synchronous_standby_names") == "none", "the setting")
    writer.start()
    try:
        wait_until(waits, "the commit to wait for the standby")
        yield Lsn.parse(database.value("select pg_current_wal_flush_lsn()::text"))
    finally:
        database.execute("alter system reset synchronous_standby_names")
        database.value("select pg_reload_conf()")
        writer.join()


def _columns(capturing: Capturing) -> list[tuple[str, int | None]]:
    versions = (each.relation for each in capturing.zone.relations.versions(1))
    *_, newest = (each for each in versions if each.table == "t")
    return [(column.name, column.attnum) for column in newest.columns]


@pytest.mark.sampled
def test_the_columns_of_a_transaction_are_read_when_it_is_visible(
    begun: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4, F6: the server sends the rows first, and the catalog shows the columns later."""
    monkeypatch.setattr(visible_transactions, "VISIBLE_SECONDS", 0.3)
    with _waiting_commit(begun.database, _ALTER) as end:
        window = LsnWindow.of(1, begun.captured_through(), end)
        with pytest.raises(TransientError, match=r"transaction \d+ is in the WAL.*standby of"):
            begun.capture(window)
        assert begun.rows() == []
    begun.capture(window)
    assert _columns(begun) == [("id", 1), ("b", 2), ("a", 3)]
    assert shown(begun.zone.schema_events.read()) == [
        "t column_added a",
        "t column_renamed a,b",
    ]


def test_the_catalog_that_another_table_needed_is_read_again(begun: Capturing) -> None:
    """F4, F6: the first announcement reads the catalog of all tables.

    Which of the two columns a transaction means that has replaced one is not certain.
    """
    begun.database.execute("insert into u values (1)")
    first = begun.window()
    with begun.session() as session:
        with _waiting_commit(begun.database, _REPLACE):
            session.land(first)
        session.land(LsnWindow.of(1, first.end, begun.flush_lsn()))
    assert begun.texts("u") == [["1"]]
    assert "t columns_uncertain!" in shown(begun.zone.schema_events.read())
