"""Comparisons of large tables that only Spark can write."""

from __future__ import annotations

import pytest

from pgcdc_assets.verify import small_table
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.spark_only import FEATURES
from pgcdc_assets_tests.support.verify.comparison import verify
from pgcdc_assets_tests.verify.test_compare_at import SOAK, plant

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.sampled]


@pytest.mark.parametrize(
    "feature",
    [
        "clustering",
        pytest.param("row tracking", marks=SOAK),
        pytest.param("in-commit timestamps", marks=SOAK),
    ],
)
def test_the_rows_of_a_table_that_only_spark_can_write_are_read(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    """A copy without the watermark would be built from the raw zone, which has no wrong row."""
    monkeypatch.setattr(small_table, "SMALL_ROWS", -1)
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    plant(pipeline, f"ALTER TABLE {{t}} {FEATURES[feature]}")
    pipeline.database.execute("insert into t values (2, 'b')")
    pipeline.sync()
    plant(pipeline, "UPDATE {t} SET v = 'wrong' WHERE id = 1")
    pipeline.database.execute("insert into t values (3, 'c')")
    found = verify(pipeline)
    assert (found.missing, found.extra, found.differing) == (0, 0, 1)
    plant(pipeline, "UPDATE {t} SET v = 'a' WHERE id = 1")
    assert verify(pipeline).is_equal
