"""The reports of merges in a run that continues: while windows wait, at its end, if it dies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.assets import merge_reports
from pgcdc_assets.orchestration.assets.merge_rounds import MergeRounds
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS
from pgcdc_assets.orchestration.metadata import THROUGH_METADATA
from pgcdc_assets.orchestration.runs import long_runs
from pgcdc_assets.tables.state import read_scd_state, table_path
from pgcdc_assets.verify import compare_table
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.orchestration.long_runs import (
    asked,
    evaluated,
    land_aside,
    running_beside,
)
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

B = dg.AssetKey([NAME, "scd1", "public", "b"])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_runs, "IDLE_SECONDS", 4.0)


@pytest.mark.sampled
@pytest.mark.parametrize(("most_seconds", "reports"), [(60.0, 1), (0.0, 4)])
def test_while_windows_wait_merges_are_reported_together(
    continuing: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    most_seconds: float,
    reports: int,
) -> None:
    """Each table is reported once in `MOST_SECONDS`, and at the end of the run."""
    monkeypatch.setattr(MergeRounds, "has_landed", lambda _: True)
    monkeypatch.setattr(merge_reports, "MOST_SECONDS", most_seconds)
    monkeypatch.setattr(merge_reports, "SECONDS_AT_ONCE", 60.0)
    path = table_path(continuing.lake, NAME, "public", "b", 1)

    def is_merged(window: LsnWindow) -> bool:
        state = read_scd_state(continuing.lake, NAME, path)
        return state is not None and state.watermark == window.end_position

    continuing.land()

    def land_and_wait() -> None:
        for number in range(1, 4):
            wait_until(partial(is_merged, LsnWindow.parse(continuing.windows()[-1])), "a merge")
            continuing.commit(f"insert into b values ({number}, 1)")
            land_aside(continuing)

    with running_beside(land_and_wait):
        result = continuing.execute(asked(continuing, "merges"), "merge")
    assert result.success

    assert evaluated(result, B).count(INVARIANTS) == reports
    events = [e for e in result.get_asset_materialization_events() if e.asset_key == B]
    assert [event.partition for event in events] == continuing.windows()
    figures = [e.materialization.metadata for e in events if "steps" in e.materialization.metadata]
    assert len(figures) == max(2, reports), "the first merge has its own event"
    assert sum(float(str(each["rows_inserted"].value)) for each in figures[1:]) == 3
    shown = [str(e.materialization.metadata[THROUGH_METADATA].value) for e in events]
    first, *later = continuing.windows()
    assert shown == [first, *(later if reports == 4 else later[-1:] * 3)]
    assert "every table is merged" in (continuing.tick("merges").skip_message or "")


@pytest.mark.sampled
def test_merges_of_a_run_that_dies_before_its_report_are_reported_by_the_next_run(
    continuing: Orchestrated, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    continuing.land()
    request = asked(continuing, "merges")

    def land_one() -> None:
        wait_until(lambda: bool(continuing.instance.get_materialized_partitions(B)), "a merge")
        continuing.commit("insert into b values (1, 1)")
        land_aside(continuing)

    with monkeypatch.context() as patched, running_beside(land_one):
        report = merge_reports.MergeReports.yield_kept

        def die_later(self: merge_reports.MergeReports, *more: Any) -> Iterator[Any]:
            if any(kept.reports for kept in self._kept.values()):
                raise RuntimeError("planted")
            yield from report(self, *more)

        patched.setattr(merge_reports.MergeReports, "yield_kept", die_later)
        assert not continuing.execute(request, "merge").success
    merged, _ = continuing.windows()
    assert continuing.instance.get_materialized_partitions(B) == {merged}
    assert compare_table(
        continuing.database.settings(), continuing.zone, "pub", "public", "b"
    ).is_equal, "the merge was committed"

    continuing.commit("insert into a values (77, 'x')")
    land_aside(continuing)
    (again,) = continuing.tick("merges").run_requests
    result = continuing.execute(again, "merge")
    assert result.success
    assert continuing.instance.get_materialized_partitions(B) == set(continuing.windows())
    newest = continuing.instance.get_latest_materialization_event(B)
    assert newest is not None
    assert newest.asset_materialization is not None
    version = (newest.asset_materialization.tags or {})["dagster/data_version"]
    assert version, "the table counts as changed, though the second run has not changed it"
