"""The positions of rows among many TRUNCATEs."""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge.change_stats import Truncation
from pgcdc_assets.merge.fold.truncates import (
    count_before_sql,
    next_truncate_sql,
    truncate_sql,
)
from pgcdc_assets_tests.support.merge.history import CLOCK

MANY = 3000


def _truncates(count: int) -> list[Truncation]:
    """Return TRUNCATEs, some in the same transaction as the previous TRUNCATE."""
    return [
        Truncation(number // 3 * 16, number % 3 * 4, CLOCK + dt.timedelta(microseconds=number))
        for number in range(count)
    ]


def _expressions(count: int) -> int:
    truncates = _truncates(count)
    sql = count_before_sql(truncates) + next_truncate_sql(truncates, "seg")
    return sql.count("(")


def test_the_size_of_a_query_does_not_grow_with_truncates() -> None:
    assert _expressions(MANY) == _expressions(1)


@pytest.mark.spark
@pytest.mark.parametrize("count", [1, 2, 7, 8, MANY])
def test_each_row_finds_its_previous_and_next_truncate(spark: SparkSession, count: int) -> None:
    truncates = _truncates(count)
    places = spark.range(0, 2 * count + 6).selectExpr(
        "id DIV 2 * 8 AS lsn", "id % 2 * 5 + 1 AS ordinal", "id = 3 AS is_stored"
    )
    found = (
        places.selectExpr("*", f"{count_before_sql(truncates)} AS seg")
        .selectExpr("*", f"{next_truncate_sql(truncates, 'seg')} AS next")
        .collect()
    )
    positions = [(t.commit_lsn, t.ordinal) for t in truncates]
    assert len(found) == 2 * count + 6
    for row in found:
        before = 0 if row.is_stored else bisect_left(positions, (row.lsn, row.ordinal))
        assert row.seg == before
        if before == count:
            assert row.next is None
        else:
            following = truncates[before]
            assert (row.next.lsn, row.next.ordinal) == positions[before]
            assert row.next.ts.replace(tzinfo=dt.UTC) == following.commit_ts


@pytest.mark.spark
def test_a_truncate_has_its_position_and_its_time(spark: SparkSession) -> None:
    truncate = Truncation(2**40, 7, CLOCK + dt.timedelta(microseconds=123_457))
    (row,) = spark.range(1).selectExpr(f"{truncate_sql(truncate)} AS at").collect()
    assert (row.at.lsn, row.at.ordinal) == (2**40, 7)
    assert row.at.ts.replace(tzinfo=dt.UTC) == truncate.commit_ts
