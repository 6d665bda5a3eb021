"""Small tables are read by delta-rs in bounded memory, and sent to Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.verify.small_table import SmallTable, local_rows, read_small
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

_ROWS = 20_000

_READ = """
import sys
import pyarrow as pa
from deltalake import DeltaTable
from pgcdc_assets.verify.small_table import read_small

assert read_small(DeltaTable(sys.argv[1])) is None
print(pa.default_memory_pool().max_memory())
"""


def test_a_small_file_with_large_rows_is_not_read_into_memory(tmp_path: Path) -> None:
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * _ROWS, pa.int32()), ["x" * 50_000])
    write_deltalake(tmp_path, pa.table({"id": range(_ROWS), "v": repeated}))
    (file,) = tmp_path.glob("*.parquet")
    assert file.stat().st_size < 1 << 20
    child = subprocess.run(
        [sys.executable, "-c", _READ, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert int(child.stdout) < 100 << 20


def test_a_small_table_is_read_with_the_types_of_its_log(tmp_path: Path) -> None:
    rows = pa.table({"id": range(_ROWS), "v": pa.array(["a", None] * (_ROWS // 2))})
    write_deltalake(tmp_path, rows)
    small = read_small(DeltaTable(tmp_path))
    assert small is not None
    assert small.rows.sort_by("id") == rows


@pytest.mark.spark
def test_rows_of_a_table_without_a_batch_are_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    texts = pa.map_(pa.string(), pa.string())
    schema = pa.schema([("id", pa.int32()), ("_rescued", texts), ("at", pa.timestamp("us", "UTC"))])
    table = DeltaTable.create(str(tmp_path), schema).schema().to_json()
    rows = pa.Table.from_batches([], schema)
    assert local_rows(spark, SmallTable(rows, table)).count() == 0


@pytest.mark.postgres
@pytest.mark.spark
def test_an_empty_table_equals_its_source(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key, v text)")
    pipeline.sync()
    assert verify(pipeline).is_equal


@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.sampled
def test_a_table_that_has_lost_all_rows_equals_its_source(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    pipeline.database.execute("delete from t")
    pipeline.sync()
    assert not DeltaTable(pipeline.path()).file_uris()
    assert verify(pipeline).is_equal
