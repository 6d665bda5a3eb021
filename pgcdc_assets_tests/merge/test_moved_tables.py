"""A renamed table does not become stale silently (F8)."""

from __future__ import annotations

import pytest

from pgcdc_assets.errors import TableMoved
from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize("scd", [1, 2])
def test_a_merge_stops_where_changes_came_under_another_name_until_a_new_snapshot(
    pipeline: Pipeline, scd: int
) -> None:
    target = CdcTable("public", "t", scd=(scd,))
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    database = pipeline.database
    database.execute("insert into t values (2, 'a')")
    pipeline.capture()
    pipeline.merge(None, target)
    database.execute("alter table t rename to u")
    database.execute("insert into u values (3, 'a')")
    pipeline.capture()
    (failure,) = pipeline.merge(None, target).values()
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TableMoved)
    assert "public.t is called public.u since" in str(failure.error)
    database.execute("alter table u rename to t")
    database.execute("insert into t values (4, 'a')")
    pipeline.capture()
    (failure,) = pipeline.merge(None, target).values()
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TableMoved)
    pipeline.copy("t")
    pipeline.capture()
    (report,) = pipeline.merge(None, target).values()
    assert isinstance(report, MergeReport), report.error
    path = table_path(pipeline.zone.lake, pipeline.zone.name, "public", "t", scd)
    found = pipeline.spark.read.format("delta").load(path).select("id").collect()
    assert sorted(row.id for row in found) == [1, 2, 3, 4]
