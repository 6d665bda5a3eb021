"""Small tables that several threads write at a time."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Landing, column, relation, update
from pgcdc_assets_tests.support.merge.small_tables import merge_together, merges_by_spark

pytestmark = [pytest.mark.spark, pytest.mark.sampled]

_TABLES = 5
_TARGETS = [CdcTable("shop", f"items_{number}") for number in range(_TABLES)]


@pytest.fixture
def landing(spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch) -> Landing:
    """Return merged tables of one row, each with a change that is not merged yet."""
    merge_together(monkeypatch)
    first = relation(column("id"), column("v", "text"))
    relations = [
        replace(first, relation_id=first.relation_id + number, table=target.table)
        for number, target in enumerate(_TARGETS)
    ]
    landing = Landing(zone, relations)
    changes = [replace(update("1", "a"), relation_id=each.relation_id) for each in relations]
    landing.begin()
    landing.land(changes)
    _merge_all(spark, landing)
    landing.land([replace(change, new=("1", "b")) for change in changes])
    return landing


def _merge_all(
    spark: SparkSession, landing: Landing, parallelism: int = 2, lake: Lake | None = None
) -> list[str]:
    """Merge all tables, of the landing's lake or of another lake; return their paths."""
    zone = landing.zone if lake is None else RawZone(lake, landing.zone.name)
    paths = []
    for report in merge_tables(spark, zone, _TARGETS, landing.windows[-1], parallelism=parallelism):
        assert isinstance(report, MergeReport), report
        paths.append(report.path)
    return paths


def _copy(source: Lake, target: Lake) -> None:
    """Copy all files of a local lake."""
    files = filesystem(target, target.uri)
    for path in Path(source.uri).rglob("*"):
        if path.is_file():
            with files.open_output_stream(str(path.relative_to(source.uri))) as stream:
                stream.write(path.read_bytes())


def _values(spark: SparkSession, path: str) -> list[str]:
    return [row["v"] for row in spark.read.format("delta").load(path).collect()]


def test_tables_are_written_at_the_same_time(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One write alone would wait in vain.
    barrier = Barrier(_TABLES, timeout=60)

    def reach(name: str) -> None:
        if name == failpoints.BEFORE_BATCH_COMMIT:
            barrier.wait()

    monkeypatch.setattr(failpoints, "reach", reach)
    paths = _merge_all(spark, landing, parallelism=_TABLES)
    assert [_values(spark, path) for path in paths] == [["b"]] * _TABLES
    assert [merges_by_spark(path) for path in paths] == [0] * _TABLES


def test_in_an_object_store_more_tables_are_written_at_the_same_time(
    spark: SparkSession, landing: Landing, s3_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copy(landing.zone.lake, s3_lake)
    barrier = Barrier(_TABLES, timeout=60)

    def reach(name: str) -> None:
        if name == failpoints.BEFORE_BATCH_COMMIT:
            barrier.wait()

    monkeypatch.setattr(failpoints, "reach", reach)
    for path in _merge_all(spark, landing, lake=s3_lake):
        table = DeltaTable(path, storage_options=s3_lake.delta_options)
        (file,) = pa.table(table.get_add_actions()).column("path").to_pylist()
        with filesystem(s3_lake, path).open_input_file(file) as source:
            assert pq.read_table(source, columns=["v"]).to_pylist() == [{"v": "b"}]


def test_no_further_table_is_written_after_the_caller_has_stopped(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def reach(name: str) -> None:
        if name == failpoints.BEFORE_BATCH_COMMIT:
            begun.append(name)
            if len(begun) > 1:
                time.sleep(0.5)

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "reach", reach)
        outcomes = merge_tables(spark, landing.zone, _TARGETS, landing.windows[-1], parallelism=1)
        assert isinstance(outcomes, Generator)
        assert isinstance(next(outcomes), MergeReport)
        outcomes.close()
    assert len(begun) == 2
    assert [_values(spark, path) for path in _merge_all(spark, landing)] == [["b"]] * _TABLES
