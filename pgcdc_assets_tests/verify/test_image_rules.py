"""The count of duplicate keys by pyarrow equals the count by Spark, or is left to Spark."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.spark.tuning import SMALL_BYTES
from pgcdc_assets.verify.image_rules import count_duplicates, count_small_duplicates
from pgcdc_assets.verify.merge_key import MergeKey
from pgcdc_assets.verify.table_version import TableVersion

pytestmark = pytest.mark.spark

_FAR = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
_RESCUED = pa.map_(pa.string(), pa.string())

# Values of the key's columns: the first row, then the others.
Columns = list[tuple[list[Any], pa.DataType]]

COUNTED: dict[str, Columns] = {
    "whole numbers": [([1, 2, 2, 3, 3, 3], pa.int64())],
    "texts": [(["a", "a ", "A", "á", "á", "", "", "\x00"], pa.string())],
    "bytes": [([b"", b"\x00", b"\x00", b"\xff"], pa.binary())],
    "numerics": [([Decimal("1.00"), Decimal("1.00"), Decimal("-1.00")], pa.decimal128(10, 2))],
    "dates": [([dt.date(1, 1, 1), dt.date(1, 1, 1), dt.date(9999, 1, 1)], pa.date32())],
    "times beyond nanoseconds": [
        ([_FAR, _FAR, dt.datetime(1, 1, 1, tzinfo=dt.UTC)], pa.timestamp("us", "UTC"))
    ],
    "two columns": [([1, 1, 1, 2], pa.int32()), (["x", "y", "x", "x"], pa.string())],
    "no duplicates": [([True, False], pa.bool_())],
}
LEFT_TO_SPARK: dict[str, Columns] = {
    "floats": [([0.0, -0.0, float("nan"), float("nan")], pa.float64())],
    "keys without a value": [([dt.date(2020, 1, 1), None, None], pa.date32())],
}


def make(
    folder: Path,
    columns: Columns,
    texts: list[str | None] | None = None,
) -> tuple[RawZone, TableVersion]:
    """Write a table of two files, and return its version."""
    path = str(folder / "image")
    names = [f"key {number}" for number in range(len(columns))]
    count = len(columns[0][0])
    data = {name: pa.array(*column) for name, column in zip(names, columns, strict=True)}
    rescued = [None if text is None else [(names[0], text)] for text in texts or [None] * count]
    rows = pa.table(
        {**data, "_lsn": pa.array(range(count)), "_rescued": pa.array(rescued, _RESCUED)}
    )
    for part in (rows.slice(0, count // 2), rows.slice(count // 2)):
        write_deltalake(path, part, mode="append")
    table = DeltaTable(path)
    files = tuple(
        f"{path}/{name}" for name in pa.table(table.get_add_actions())["path"].to_pylist()
    )
    assert len(files) == 2
    version = TableVersion(
        path,
        table.version(),
        {},
        tuple(rows.column_names),
        tuple(names),
        0,
        1,
        0,
        count,
        None,
        files,
    )
    return RawZone(Lake(str(folder)), "test"), version


def by_spark(spark: SparkSession, version: TableVersion) -> tuple[int, int]:
    rows = spark.sql(f"SELECT * FROM {delta_table(version.path)}")
    return count_duplicates(spark, rows, MergeKey(version.key, dict(rows.dtypes)), None)


@pytest.mark.sampled
@pytest.mark.parametrize("columns", COUNTED.values(), ids=COUNTED)
def test_the_count_equals_that_of_spark(
    spark: SparkSession, tmp_path: Path, columns: Columns
) -> None:
    zone, version = make(tmp_path, columns)
    found = count_small_duplicates(zone, version)
    assert found is not None
    assert found == by_spark(spark, version)


@pytest.mark.parametrize("columns", LEFT_TO_SPARK.values(), ids=LEFT_TO_SPARK)
def test_keys_with_several_forms_are_left_to_spark(tmp_path: Path, columns: Columns) -> None:
    zone, version = make(tmp_path, columns)
    assert count_small_duplicates(zone, version) is None


def test_small_files_whose_keys_need_much_memory_are_left_to_spark(tmp_path: Path) -> None:
    start = "a" * 10_000
    zone, version = make(tmp_path, [([f"{start}{n}" for n in range(4_000)], pa.string())])
    assert version.files is not None
    assert sum(Path(file).stat().st_size for file in version.files) < SMALL_BYTES / 10
    assert count_small_duplicates(zone, version) is None


def test_a_lost_file_and_a_table_without_rows(tmp_path: Path) -> None:
    zone, version = make(tmp_path, COUNTED["whole numbers"])
    assert version.files is not None
    Path(version.files[0]).unlink()
    assert count_small_duplicates(zone, version) is None, "Spark explains what is wrong"
    empty = TableVersion(version.path, 0, {}, version.columns, version.key, 0, 1, 0, 0, None, ())
    assert count_small_duplicates(zone, empty) == (0, 0)
