"""A raw zone without its relation versions, and the new epoch that its error names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


@pytest.mark.sampled
def test_a_new_epoch_continues_all_tables_without_the_lost_versions(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    tables = tuple(CdcTable("public", name, scd=(1, 2)) for name in "ab")
    capture = replace(orchestrated.capture, tables=tables)
    database, instance = orchestrated.database, orchestrated.instance
    first = Orchestrated(database, orchestrated.lake, instance, capture)
    first.sync()
    first.commit("insert into a values (11, 'of the first epoch')")
    first.sync()
    DeltaTable(first.zone.relations.table.uri).delete()

    first.commit("update a set v = 'changed' where id = 1")
    with pytest.raises(PgcdcError, match="begin a new epoch with pgcdc renew --name t"):
        first.sync()
    assert renew_epoch(database.settings(), first.zone, capture.slot, "pub").epoch == 2
    second = Orchestrated(database, orchestrated.lake, instance, capture)
    second.sync()
    second.commit("delete from a where id = 2")
    second.sync()
    assert second.equals_source("a") and second.equals_source("b")
    rows = spark.read.format("delta").load(table_path(second.lake, NAME, "public", "a", 2))
    found = {(row["id"], row["v"]) for row in rows.where("_is_current").collect()}
    expected = {(row[0], row[1]) for row in database.query("select id, v from a")}
    assert found == expected
    # The versions of the first epoch are still in the history.
    assert rows.where("id = 1").count() == 2
