"""Comparisons at the end of a sync that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.relations.schema_events import CATALOG, SchemaChange, SchemaEvent
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


def make_uncertain(orchestrated: Orchestrated, table: str) -> None:
    """Record that USING may have changed the values of a table."""
    lsn = Lsn.parse(orchestrated.database.value("select pg_current_wal_lsn()::text"))
    name, change = TableName("public", table), SchemaChange.VALUES_UNCERTAIN
    event = SchemaEvent(1, lsn, name, 7, change, (), "It was rewritten.", False, CATALOG)
    orchestrated.zone.schema_events.record([event])


@pytest.mark.sampled
def test_a_sync_fails_if_a_table_cannot_be_compared_and_compares_the_other_tables(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    orchestrated.sync()
    for table in ("a", "b"):
        make_uncertain(orchestrated, table)
    folder = Path(orchestrated.lake.path(NAME, "scd1", "public", "a"))
    files = {path: path.read_bytes() for path in folder.glob("**/*.parquet")}
    for path in files:
        path.unlink()

    with pytest.raises(PgcdcError, match=r"Not compared: public\.a\. ") as caught:
        orchestrated.sync()
    assert caught.value.exit_status != 0
    assert confirmed(orchestrated) == {"b"}

    for path, content in files.items():
        path.write_bytes(content)
    orchestrated.sync()
    assert confirmed(orchestrated) == {"a", "b"}


def confirmed(orchestrated: Orchestrated) -> set[str]:
    events = orchestrated.zone.schema_events.read()
    return {e.table.table for e in events if e.change == SchemaChange.VALUES_CONFIRMED}


@pytest.mark.sampled
def test_other_columns_of_an_idle_table_with_equal_values_cost_no_snapshot(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """F5, F7. The lake's tables get or lose the other columns with the next row."""
    orchestrated.sync()
    database, zone = orchestrated.database, orchestrated.zone
    for statement in (
        "alter table a alter id type bigint",
        "alter table a add n int default 5",
        "alter table b alter id type bigint, drop column n",
    ):
        database.execute(statement)
    orchestrated.sync()
    assert confirmed(orchestrated) == {"a", "b"}
    assert len(zone.snapshots.complete_snapshots()) == 2

    # A renamed column is not compared: the lake has it under its earlier name.
    database.execute("alter table a alter id type numeric using id * 2")
    database.execute("alter table a rename id to key")
    orchestrated.sync()
    assert len(zone.snapshots.complete_snapshots()) == 3
    assert orchestrated.equals_source("a")
