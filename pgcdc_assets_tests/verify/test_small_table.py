"""Small tables that delta-rs reads, and Spark gets."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from pyspark.sql import SparkSession

from pgcdc_assets.verify.small_table import local_rows, read_small
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = pytest.mark.spark

_SCHEMA = pa.schema(
    [
        ("id", pa.int32()),
        ("tags", pa.list_(pa.field("element", pa.string()))),
        ("_commit_ts", pa.timestamp("us", tz="UTC")),
        ("_rescued", pa.map_(pa.string(), pa.string())),
    ]
)


def test_a_table_without_files_is_a_frame_without_rows(spark: SparkSession, tmp_path: Path) -> None:
    small = read_small(DeltaTable.create(str(tmp_path / "t"), Schema.from_arrow(_SCHEMA)))
    assert small is not None
    frame = local_rows(spark, small)
    assert frame.columns == _SCHEMA.names
    assert frame.collect() == []


@pytest.mark.postgres
@pytest.mark.sampled
def test_a_table_that_has_lost_all_rows_equals_its_source(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    pipeline.database.execute("delete from t")
    pipeline.sync()
    assert not DeltaTable(pipeline.path()).file_uris()
    assert verify(pipeline).is_equal
