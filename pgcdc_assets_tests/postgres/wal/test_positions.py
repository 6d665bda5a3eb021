"""Positions of the WAL."""

from __future__ import annotations

import time

import pytest

from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.wal.positions import read_barrier, read_current_lsn
from pgcdc_assets_tests.support.database import Database

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]


def test_a_barrier_does_not_wait_for_an_open_transaction(database: Database) -> None:
    """The WAL writer leaves the last, incomplete page of WAL until a transaction commits."""
    database.execute("create table t (id int)")
    with (
        query_connection(database.settings(), "test") as conn,
        database.connect(autocommit=False) as writer,
        writer.cursor() as cursor,
    ):
        read_barrier(conn)
        cursor.execute("insert into t values (1)")
        began = time.monotonic()
        barrier = read_barrier(conn)
        assert time.monotonic() - began < 5
        assert read_current_lsn(conn) >= barrier
        cursor.execute("select %s <= pg_current_wal_flush_lsn()", (str(barrier),))
        assert cursor.fetchone() == (True,)
