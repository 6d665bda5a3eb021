"""The columns that identify compared rows."""

from __future__ import annotations

import pytest

from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.verify import Difference, DifferenceKind
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.sampled
def test_a_key_of_the_settings_whose_column_was_renamed_identifies_compared_rows(
    pipeline: Pipeline,
) -> None:
    """Merges follow the name, and `pgcdc init` writes the key of each table to the settings."""
    key = ("tenant", "id")
    table = CdcTable("public", "t", key=key)
    pipeline.start(
        "create table t (tenant int, id int, v text, primary key (tenant, id))",
        "insert into t values (1, 1, 'a'), (1, 2, 'b'), (1, 3, 'c'), (2, 1, 'd')",
    )
    pipeline.sync(table)
    pipeline.database.execute("alter table t rename id to number")
    pipeline.database.execute("update t set v = 'e' where number = 3")
    pipeline.sync(table)
    assert verify(pipeline, key=key).is_equal
    pipeline.spark.sql(f"UPDATE {delta_table(pipeline.path())} SET v = 'wrong' WHERE number = 2")
    found = verify(pipeline, key=key)
    assert found.key_columns == ("tenant", "number")
    assert found.differences == (Difference(DifferenceKind.DIFFERS, ("1", "2"), ("v",)),)
