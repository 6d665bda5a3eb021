"""The key range of a MERGE's join contains the changes, and is often the same."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.change_stats import ChangeStats
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.key_range import (
    ColumnRange,
    KeyRange,
    find_key_range,
    match_sql,
    widen_range,
)
from pgcdc_assets.merge.fold.schema import build_schema
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets_tests.support.merge.history import column, relation

_BITS = {"SMALLINT": 16, "INT": 32, "BIGINT": 64}


@given(st.data(), st.sampled_from(sorted(_BITS)))
def test_a_widened_range_contains_the_range_and_fits_the_type(
    data: st.DataObject, ddl: str
) -> None:
    limit = 1 << (_BITS[ddl] - 1)
    values = st.integers(-limit, limit - 1)
    least, most = sorted((data.draw(values), data.draw(values)))
    low, high = widen_range(least, most)
    assert -limit <= low <= least <= most <= high < limit
    length = most - least + 1
    assert least - low <= length / 4 and high - most <= length


@pytest.mark.parametrize(
    ("least", "most", "widened"),
    [
        (7, 7, (7, 7)),
        (100, 163, (100, 175)),
        (101, 164, (100, 175)),
        (1, 1024, (0, 1279)),
        (-1024, -1, (-1024, -1)),
        (-32700, 32760, (-(2**15), 2**15 - 1)),
    ],
)
def test_the_upper_end_is_widened_more_than_the_lower_end(
    least: int, most: int, widened: tuple[int, int]
) -> None:
    found = widen_range(least, most)
    assert found == widened
    # They are literals of whole numbers.
    assert [type(end) for end in found] == [int, int]


def test_new_keys_at_the_upper_end_seldom_change_the_range() -> None:
    ranges = [widen_range(9_000_000, 10_000_000 + 20_000 * step) for step in range(20)]
    assert len(set(ranges)) <= 3


@pytest.mark.parametrize(
    ("least", "most", "rows"),
    [(0, 999, 1000), (0, 499, 500), (250, 1249, 750), (1000, 2000, 0), (-10, -1, 0)],
)
def test_rows_in_a_range_are_estimated_from_the_files_statistics(
    least: int, most: int, rows: int
) -> None:
    files = pa.table(
        {
            "num_records": [1000, 1000],
            "min.id": pa.array([0, None], pa.int64()),
            "max.id": pa.array([999, None], pa.int64()),
        }
    )
    # All rows of a file without statistics may be in the range.
    known, unknown = files.slice(0, 1), files.slice(1)
    key_range = KeyRange((ColumnRange("id", "BIGINT", least, most),))
    assert key_range.estimate_rows(unknown) == 1000
    assert key_range.estimate_rows(known) == rows
    assert key_range.estimate_rows(known.drop_columns(["min.id"])) is None
    counted = known.set_column(0, "num_records", pa.array([None], pa.int64()))
    assert key_range.estimate_rows(counted) is None


def _fold(*kinds: str) -> Fold:
    columns = [column(f"column {number}", kind) for number, kind in enumerate(kinds)]
    made = relation(*columns, column("v", "text"), key=tuple(each.name for each in columns))
    return Fold(build_schema([RelationVersion(1, 1, Lsn(1), made)], None), ChangeStats())


def test_rows_are_estimated_from_the_ranges_of_all_columns() -> None:
    files = pa.table(
        {
            "num_records": [1000, 100],
            "min.a": [0, 0],
            "max.a": [99, 9],
            "min.b": [0, 50],
            "max.b": [9, 59],
        }
    )
    ranges = ColumnRange("a", "INT", 50, 200), ColumnRange("b", "INT", 0, 4)
    assert KeyRange(ranges).estimate_rows(files) == 250
    assert KeyRange(ranges[1:]).estimate_rows(files) == 500


@pytest.mark.spark
def test_the_range_of_changed_keys_is_that_of_their_whole_numbers(spark: SparkSession) -> None:
    fold = _fold("int8", "text", "int2")
    ddl = "key_0 BIGINT, key_1 STRING, key_2 SMALLINT"
    rows = spark.createDataFrame([(164, "b", 7), (101, "a", 7)], ddl)
    found = find_key_range(rows, fold)
    assert found is not None
    assert found.ranges == (
        ColumnRange("column 0", "BIGINT", 100, 175),
        ColumnRange("column 2", "SMALLINT", 7, 7),
    )
    keys = [(99, "a", 7), (100, "x", 7), (101, "a", 7), (175, "x", 7), (176, "x", 7), (101, "a", 8)]
    table = spark.createDataFrame(keys, "`column 0` BIGINT, `column 1` STRING, `column 2` SMALLINT")
    inside = {(100, "x", 7), (101, "a", 7), (175, "x", 7)}
    assert {tuple(row) for row in table.where(found.condition_sql()).collect()} == inside
    other = KeyRange((ColumnRange("column 0", "BIGINT", 150, 200),))
    for key_range, matched in ((None, {(101, "a", 7)}), (found, {(101, "a", 7)}), (other, set())):
        on = F.expr(match_sql(fold, key_range))
        met = table.alias("t").join(rows.alias("s"), on=on).select("t.*")
        assert {tuple(row) for row in met.collect()} == matched
    assert find_key_range(rows.where("false"), fold) is None
    assert find_key_range(rows, _fold("text")) is None
