"""Columns that the source has widened, in a table without a change since."""

from __future__ import annotations

import pytest

from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.sampled
def test_a_widened_column_of_an_idle_table_equals_its_source(pipeline: Pipeline) -> None:
    """The table gets the new type with its next row. A difference would cost a snapshot."""
    pipeline.start(
        "create table t (id date primary key, d date, r real, n numeric(5, 2), i int)",
        "insert into t values ('2024-01-02', '2024-02-29', 0.1, 1.5, 7), "
        "('4000-01-01 BC', 'infinity', '-0', 'NaN', null), ('12000-12-31', null, 'NaN', 0, 0)",
    )
    pipeline.sync()
    pipeline.database.execute(
        "alter table t alter id type timestamp, alter d type timestamp, alter r type float8, "
        "alter n type numeric(9, 4), alter i type numeric(12, 2)"
    )
    found = verify(pipeline)
    assert found.is_equal, found
    pipeline.database.execute("update t set i = 8 where i = 7")
    pipeline.sync()
    assert verify(pipeline).is_equal
    pipeline.spark.sql(f"UPDATE {delta_table(pipeline.path())} SET d = NULL WHERE i = 8")
    assert verify(pipeline).columns == ("d",)


def test_a_wrong_date_of_a_widened_column_is_found(pipeline: Pipeline) -> None:
    pipeline.start(
        "create table t (id int primary key, d date)", "insert into t values (1, '2024-01-02')"
    )
    pipeline.sync()
    pipeline.database.execute("alter table t alter d type timestamp using d + time '00:00:01'")
    assert verify(pipeline).columns == ("d",)
