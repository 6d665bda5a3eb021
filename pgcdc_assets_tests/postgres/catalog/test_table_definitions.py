"""Looks at the catalog agree with what the server sends."""

from __future__ import annotations

import pytest

from pgcdc_assets.postgres.catalog.table_definitions import read_definitions
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.slots.creation import create_slot
from pgcdc_assets.raw.relations.definition_changes import compare_definitions
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.postgres.wire import peek

pytestmark = pytest.mark.postgres


@pytest.mark.every_pg(since=15)
def test_the_column_list_of_a_partition_counts_although_its_root_has_none(
    database: Database,
) -> None:
    """A rewrite of a column that the server does not send is no change of the table."""
    database.execute(
        "create table root (id int, a int, b int) partition by range (id);"
        "create table leaf partition of root for values from (0) to (9);"
        "create publication pub for table root, leaf (id, a)"
    )
    slot = f"s_{database.name}"
    with create_slot(database.settings(), slot):
        pass
    with query_connection(database.settings(), "test") as conn:
        before = read_definitions(conn, "pub", [])
        database.execute("insert into root values (1, 2, 3)")
        database.execute("alter table root alter b type bigint using b + 1")
        after = read_definitions(conn, "pub", [])
        assert peek(conn, slot, "pub").rows == {"public.leaf": [["1", "2"]]}
    [oid] = after
    assert [column.name for column in after[oid].relation.columns] == ["id", "a"]
    assert after[oid].is_rewritten_since(before[oid])
    assert compare_definitions(before[oid], after[oid]) == []
