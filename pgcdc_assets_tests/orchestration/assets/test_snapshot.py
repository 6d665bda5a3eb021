"""The records of a run of snapshots that ends before its last table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from pgcdc_assets.capture.snapshot import snapshot_each_table
from pgcdc_assets.orchestration.assets.snapshot import build_snapshot_asset
from pgcdc_assets.orchestration.partitions import build_range_tags
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = pytest.mark.postgres

SNAPSHOT = dg.AssetKey([NAME, "snapshot"])


def copied(result: dg.ExecuteInProcessResult) -> set[str | None]:
    """Return the tables that a run reports as copied."""
    return {event.partition for event in result.get_asset_materialization_events()}


def test_a_failed_run_reports_the_tables_that_it_has_copied(orchestrated: Orchestrated) -> None:
    """`pgcdc sync` names the tables that are missing from this report."""
    orchestrated.database.execute("create table c (id int primary key)")
    tables = (*orchestrated.capture.tables, CdcTable("public", "c"))
    wider = replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))
    (request,) = wider.tick("lag").run_requests
    result = wider.execute(request, "snapshot")
    assert not result.success
    assert copied(result) == {"public.a", "public.b"}
    assert wider.instance.get_materialized_partitions(SNAPSHOT) == copied(result)


def test_a_run_that_ends_early_has_recorded_what_it_has_copied(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run copies the other tables only, so nothing else would record them."""
    seen: list[str] = []

    def ends_early(*args: Any, **options: Any) -> Iterator[object]:
        for outcome in snapshot_each_table(*args, **options):
            seen.append(outcome.name.partition_key)
            yield outcome
            raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(f"{build_snapshot_asset.__module__}.snapshot_each_table", ends_early)
        (request,) = orchestrated.tick("lag").run_requests
        assert not orchestrated.execute(request, "snapshot").success
    assert orchestrated.instance.get_materialized_partitions(SNAPSHOT) == set(seen)
    assert len(seen) == 1
    job = orchestrated.location.repository.get_job(f"{NAME}_snapshot")
    tags = build_range_tags("public.a", "public.b")
    assert copied(job.execute_in_process(instance=orchestrated.instance, tags=tags)) == {
        "public.a",
        "public.b",
    }
