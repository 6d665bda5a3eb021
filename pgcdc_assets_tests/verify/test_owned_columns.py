"""Columns that the owner of an SCD table has added are no difference (decision 14)."""

from __future__ import annotations

import pytest

from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.session import own_sessions
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

BOTH = CdcTable("public", "t", (1, 2))


@pytest.mark.sampled
def test_an_owners_column_is_not_compared(pipeline: Pipeline) -> None:
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t values (1, 'a'), (2, 'b')",
    )
    pipeline.sync(BOTH)
    for scd in (1, 2):
        table = delta_table(pipeline.path("t", scd))
        pipeline.spark.sql(f"ALTER TABLE {table} ADD COLUMNS (note STRING)")
        pipeline.spark.sql(f"UPDATE {table} SET note = 'of the owner'")
    found = verify(pipeline)
    assert found.is_equal, found
    pipeline.assert_equal("t")
    # SCD1 keeps the owner's value of the row, and the history begins a version without one.
    pipeline.database.execute("update t set v = 'c' where id = 1")
    pipeline.sync(BOTH)
    assert verify(pipeline).is_equal
    with own_sessions(pipeline.spark, 1) as (session,):
        findings = check_all(session, pipeline.zone, BOTH, 2)
    assert findings.is_sound, findings
    # A column of the source with the name is compared, and so are columns that the source dropped.
    pipeline.database.execute("alter table t add column note text default 'of the source'")
    assert "note" in verify(pipeline).columns


@pytest.mark.sampled
def test_a_column_that_only_the_table_has_is_a_difference_if_the_source_had_it(
    pipeline: Pipeline,
) -> None:
    pipeline.start(
        "create table t (id int primary key, v text, gone int)", "insert into t values (1, 'a', 1)"
    )
    pipeline.sync()
    pipeline.database.execute("alter table t drop column gone")
    assert verify(pipeline).columns == ("gone",)
    pipeline.database.execute("alter table t rename to renamed; update renamed set v = 'b'")
    assert verify(pipeline).is_equal


@pytest.mark.sampled
def test_a_row_that_the_owner_has_added_beside_soft_deletes_is_a_difference(
    pipeline: Pipeline,
) -> None:
    """The system columns of such a row are NULL."""
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.capture()
    pipeline.merge(None, CdcTable("public", "t", soft_deletes=True))
    assert verify(pipeline).is_equal
    row = pipeline.spark.sql("SELECT 9 AS id, 'z' AS v")
    row.write.format("delta").mode("append").save(pipeline.path())
    assert verify(pipeline).extra == 1
