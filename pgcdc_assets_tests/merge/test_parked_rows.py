"""A table waits before its parked row until a snapshot. Other tables continue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.capture.window import CaptureReport, capture_window
from pgcdc_assets.errors import SchemaChangeError
from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.merge import pipeline as pipelines
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.proxy import TcpProxy

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

GOOD, BAD = CdcTable("public", "good"), CdcTable("public", "bad", (1, 2))
# Delta cannot distinguish their columns, so these tables are refused, without an effect on others.
REFUSED = {"twice": '"V" and column "v"', "ours": '"_LSN" and column "_lsn"'}


@pytest.mark.sampled
def test_a_table_waits_before_a_parked_row_and_continues_with_a_snapshot(
    database: Database,
    zone: RawZone,
    spark: SparkSession,
    proxy: TcpProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capture(settings: ConnectionSettings, *rest: Any) -> CaptureReport:
        damaged = replace(settings, conninfo=proxy.conninfo(settings.conninfo))
        return capture_window(damaged, *rest)

    monkeypatch.setattr(pipelines, "capture_window", capture)
    pipeline = Pipeline(database, zone, spark)
    pipeline.start(
        "create table good (id int primary key, v text)",
        "create table bad (id int primary key, v text)",
        "insert into bad values (1, 'a')",
        'create table twice (id int primary key, v text, "V" text)',
        'create table ours (id int primary key, "_LSN" text)',
        "insert into twice values (1, 'a', 'A')",
    )
    database.execute("update twice set v = 'b'")
    database.execute("insert into ours values (1, 'a')")
    proxy.damage(b"t\0\0\0\x06poison", b"b\0\0\0\x06poison")
    database.execute("update bad set v = 'b'")
    database.execute("insert into bad values (2, 'poison')")
    database.execute("insert into bad values (3, 'c')")
    database.execute("insert into good values (1, 'x')")
    pipeline.capture()

    stopped = pipeline.merge(None, replace(BAD, on_poisoned_row="stop"))["bad"]
    assert isinstance(stopped, MergeFailure)
    assert isinstance(stopped.error, SchemaChangeError)
    assert "pgcdc resnapshot" in str(stopped.error)
    refused = [CdcTable("public", table) for table in REFUSED]
    waiting = pipeline.merge(None, *refused, GOOD, BAD)
    for table, columns in REFUSED.items():
        failure = waiting[table]
        assert isinstance(failure, MergeFailure)
        assert f"Table public.{table}" in str(failure.error)
        assert columns in str(failure.error)
        assert "Rename one, or leave it out of the publication" in str(failure.error)
    assert pipeline.rows("good") == [(1, "x")]
    assert pipeline.rows("bad") == [(1, "b")]
    report = waiting["bad"]
    assert isinstance(report, MergeReport)
    assert "1 rows cannot be decoded" in report.waits_for

    database.execute("delete from bad where id = 3")
    pipeline.copy("bad")
    pipeline.capture()
    healed = pipeline.merge(None, GOOD, BAD)["bad"]
    assert isinstance(healed, MergeReport)
    assert healed.waits_for == ""
    pipeline.assert_equal("good", "bad")
    path = table_path(zone.lake, zone.name, "public", "bad", 2)
    versions = spark.read.format("delta").load(path).select("id", "v", "_is_current").collect()
    assert sorted(map(tuple, versions)) == [
        (1, "a", False),
        (1, "b", True),
        (2, "poison", True),
        (3, "c", False),
    ]
