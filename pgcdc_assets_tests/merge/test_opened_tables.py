"""How often a merge opens its table: with a log of 200,000 entries, each time takes 0.2 s."""

from __future__ import annotations

import pytest

from pgcdc_assets.merge import MergeReport
from pgcdc_assets.merge.kinds import current_image
from pgcdc_assets.raw.delta import log_table
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark, merge_together

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.sampled
@pytest.mark.parametrize("by_spark", [True, False])
def test_a_merge_opens_its_table_once_at_most(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, by_spark: bool
) -> None:
    (merge_by_spark if by_spark else merge_together)(monkeypatch)
    # A rewrite of a tiny table asks for its commit before it counts the rows.
    monkeypatch.setattr(current_image, "is_tiny", lambda *sizes: False)
    opened: list[str] = []

    class Counted(log_table.LogTable):
        def __init__(self, lake: Lake, uri: str) -> None:
            opened.append(uri)
            super().__init__(lake, uri)

    monkeypatch.setattr(log_table, "LogTable", Counted)
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    assert pipeline.path() in opened
    for number in range(3):
        pipeline.database.execute(f"insert into t values ({10 + number}, 'b')")
        pipeline.capture()
        opened.clear()
        report = pipeline.merge()["t"]
        assert isinstance(report, MergeReport)
        assert report.rows_inserted == 1
        if number > 0:
            assert opened.count(pipeline.path()) == (1 if by_spark else 0)
    pipeline.assert_equal()
