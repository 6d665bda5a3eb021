"""TRUNCATE of all partitions of a published root at once: Postgres sends nothing (E4)."""

from __future__ import annotations

import pytest

from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.sampled
def test_a_comparison_finds_the_rows_of_truncated_partitions(pipeline: Pipeline) -> None:
    """The catalog is as after TRUNCATE of the root, which the stream has."""
    database = pipeline.database
    database.execute(
        "create table t (id int primary key, v text) partition by range (id);"
        "create table low partition of t for values from (0) to (10);"
        "create table high partition of t for values from (10) to (20);"
        "insert into t values (1, 'a'), (2, 'b'), (11, 'c');"
        "create publication pub for table t with (publish_via_partition_root = true)"
    )
    pipeline.copy()
    pipeline.sync()
    pipeline.assert_equal("t")
    database.execute("truncate low, high; insert into t values (12, 'd')")
    pipeline.sync()
    comparison = pipeline.compare()
    assert not comparison.is_equal
    assert {row[0] for row in pipeline.rows()} == {1, 2, 11, 12}
    # The remedy is a new snapshot.
    pipeline.copy("t")
    pipeline.sync()
    pipeline.assert_equal("t")
