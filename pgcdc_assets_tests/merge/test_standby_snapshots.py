"""Tables whose snapshots come from a standby equal their sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgcdc_assets.capture.snapshot import snapshot_tables
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.handover import writers
from pgcdc_assets_tests.support.standby import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgcdc_assets.raw.zone import RawZone

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

STATEMENTS = (
    "insert into t values (%s, 1) on conflict do nothing",
    "update t set n = n + 1 where id = %s",
    "delete from t where id = %s",
    "insert into bag values (%s %% 9, 1)",
    "delete from bag where ctid = (select ctid from bag where id = %s %% 9 limit 1)",
)


@pytest.mark.soak
def test_current_images_equal_the_source_after_copies_of_a_standby(
    source: Source, zone: RawZone, spark: SparkSession, seed: int
) -> None:
    """C1: a bag would count a row twice that is in the snapshot and in the stream."""
    from pgcdc_assets_tests.support.merge.pipeline import Pipeline

    pipeline = Pipeline(source.primary, zone, spark, ("t", "bag"))
    source.primary.execute(
        "create table t (id int primary key, n int); create table bag (id int, n int); "
        "alter table bag replica identity full; create publication pub for table t, bag"
    )

    def copy(tables: list[TableName] | None) -> None:
        snapshot_tables(
            source.primary.settings(),
            zone,
            pipeline.slot,
            "pub",
            tables,
            standby=source.standby.settings(),
        )

    with writers(source.primary, 2, seed, STATEMENTS, key_count=300):
        copy(None)
        pipeline.capture()
        copy([TableName("public", "t"), TableName("public", "bag")])
    pipeline.sync()
    pipeline.assert_equal("t")
    assert pipeline.rows("bag", "id, n") == sorted(source.primary.query("select id, n from bag"))
