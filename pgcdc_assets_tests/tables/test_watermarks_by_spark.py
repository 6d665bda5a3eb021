"""Watermarks of tables that only Spark can write, and whose log entries expire."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import Position
from pgcdc_assets.merge.idle_tables import IDLE_WINDOWS
from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
from pgcdc_assets.raw.delta.log_entries import commit_path
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.spark_watermarks import renew_watermark
from pgcdc_assets.tables.state import read_scd_state, read_watermark
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.spark import CONF
from pgcdc_assets_tests.support.spark_only import FEATURES

pytestmark = pytest.mark.spark

_ITEMS = CdcTable("shop", "items")


def _merged(spark: SparkSession, zone: RawZone, feature: str) -> tuple[Landing, str]:
    """Merge a table with a feature that delta-rs does not write."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    spark.sql(f"ALTER TABLE {delta_table(path)} {FEATURES[feature]}")
    landing.land([insert("3", "c")])
    merge(spark, landing, _ITEMS)
    return landing, path


def _watermark(zone: RawZone) -> Position | None:
    return read_watermark(zone.lake, zone.name, "shop", "items", 1)


def _make_older(path: str, days: int) -> None:
    for file in Path(path).rglob("*"):
        at = file.stat().st_mtime - days * 86_400
        os.utime(file, (at, at))


def _renew(spark: SparkSession, zone: RawZone, path: str) -> bool:
    state = read_scd_state(zone.lake, zone.name, path)
    assert state is not None
    return renew_watermark(lambda: spark, zone, state)


def _write_checkpoint(spark: SparkSession, path: str) -> None:
    """Let Spark write a checkpoint, and then delete the entries before an expired checkpoint."""
    for number in range(2):
        spark.sql(
            f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES "
            f"('delta.checkpointInterval' = '2', 'mine' = '{number}', "
            "'delta.logRetentionDuration' = 'interval 168 hours')"
        )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "feature", ["clustering", *(pytest.param(f, marks=pytest.mark.soak) for f in [*FEATURES][1:])]
)
def test_a_table_without_changes_keeps_its_watermark(
    spark: SparkSession, zone: RawZone, feature: str
) -> None:
    landing, path = _merged(spark, zone, feature)
    mark = landing.windows[-1].end_position
    assert _watermark(zone) == mark
    first = DeltaTable(path).version()
    _write_checkpoint(spark, path)
    for _ in range(2):
        _make_older(path, 5)
        assert _renew(spark, zone, path), "the entry with the watermark is old"
    _write_checkpoint(spark, path)
    assert not Path(path, commit_path(first)).exists(), "the entry of the last merge is deleted"
    assert _watermark(zone) == mark
    assert not _renew(spark, zone, path), "the entry with the watermark is young"
    # The renewals wrote no row, and the next merge continues from the watermark.
    landing.land([insert("4", "d")])
    merge(spark, landing, _ITEMS)
    ids = [row["id"] for row in spark.read.format("delta").load(path).select("id").collect()]
    assert sorted(ids) == [1, 2, 3, 4]


@pytest.mark.sampled
def test_the_watermark_of_an_idle_table_advances(spark: SparkSession, zone: RawZone) -> None:
    """Otherwise retention would keep all later windows of the capture."""
    landing, path = _merged(spark, zone, "clustering")
    for _ in range(4 * IDLE_WINDOWS):
        landing.land([])
    files = set(DeltaTable(path).file_uris())
    assert merge(spark, landing, _ITEMS).watermark_after == landing.windows[-1].end
    assert _watermark(zone) == landing.windows[-1].end_position
    assert set(DeltaTable(path).file_uris()) == files
    landing.land([insert("4", "d")])
    merge(spark, landing, _ITEMS)
    assert spark.read.format("delta").load(path).count() == 4


@pytest.mark.sampled
def test_the_daily_job_renews_the_watermark(spark: SparkSession, zone: RawZone) -> None:
    landing, path = _merged(spark, zone, "clustering")
    before = read_scd_state(zone.lake, zone.name, path)
    _make_older(path, 5)
    definitions = build_cdc_definitions(
        CdcCapture(zone.name, "pub", (_ITEMS,)),
        postgres=PostgresResource(capture=zone.name, conninfo="host=127.0.0.1 port=1"),
        lake=LakeResource(uri=zone.lake.uri),
        spark=SparkResource(remote="local", spark_config=CONF),
    )
    with dg.DagsterInstance.ephemeral() as instance:
        job = definitions.resolve_job_def(f"{zone.name}_upkeep")
        assert job.execute_in_process(instance=instance).success
    after = read_scd_state(zone.lake, zone.name, path)
    assert before is not None
    assert after is not None
    assert after.fence == before.fence + 1
    assert after.watermark == before.watermark == landing.windows[-1].end_position
