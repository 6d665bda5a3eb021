"""Heartbeats in a table of the source."""

from __future__ import annotations

import pytest

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.heartbeat import SlotOwner, create_table_sql, write_heartbeat
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database


@pytest.mark.postgres
def test_the_numbers_of_heartbeats_exceed_the_type_integer(database: Database) -> None:
    table = TableName("public", "heartbeats")
    database.execute(create_table_sql(table))
    owner = SlotOwner("s", "shop", "/lake", "1", 1)
    with query_connection(database.settings(), "test") as conn:
        for floor, number in ((2**31 - 1, 2**31), (2**31, 2**31 + 1), (0, 2**31 + 2)):
            written = write_heartbeat(conn, table, owner, Lsn(0), floor)
            assert written is not None
            assert written.number == number
