"""What a merge shows of itself in Dagster."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

B = dg.AssetKey([NAME, "scd1", "public", "b"])


def shown(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    """One figure of table b, per window that shows it."""
    return {
        str(event.partition): event.materialization.metadata[name].value
        for event in result.get_asset_materialization_events()
        if event.asset_key == B and name in event.materialization.metadata
    }


def test_a_merge_of_several_windows_counts_its_figures_once(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    orchestrated.copy()
    for statement in (
        "insert into b select n, 1 from generate_series(1, 5) n",
        "insert into a values (100, 'another table')",
        "update b set n = 2 where id <= 3",
    ):
        orchestrated.commit(statement)
        orchestrated.land()
    windows = orchestrated.windows()
    (request,) = orchestrated.tick("merges", one_shot=True).run_requests
    result = orchestrated.execute(request, "merge")
    assert result.success

    newest = windows[-1]
    assert shown(result, "changes_read") == {newest: 8}
    assert shown(result, "rows_inserted") == {newest: 5}
    assert shown(result, "windows_folded") == {newest: 3}
    assert shown(result, "window_changes") == dict(zip(windows, [5, 0, 3], strict=True))
    assert shown(result, "inserts") == dict(zip(windows, [5, 0, 0], strict=True))
    assert shown(result, "updates") == dict(zip(windows, [0, 0, 3], strict=True))
    assert shown(result, "dagster/row_count") == dict.fromkeys(windows, 5)
    assert shown(result, "through_window") == dict.fromkeys(windows, newest)
