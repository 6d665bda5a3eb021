"""Windows that a person selects in the UI: not landed yet, not written yet, or no window at all."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.partitions import build_range_tags
from pgcdc_assets.orchestration.runs.errors import error_of_run
from pgcdc_assets.settings.policies import StreamPolicy
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = pytest.mark.postgres

FAR = 1 << 40
TYPED = "typed by hand"


def materialise(orchestrated: Orchestrated, job: str, first: str, last: str) -> str:
    """Materialise a range of windows, and return the error of the run."""
    result = orchestrated.location.repository.get_job(f"{NAME}_{job}").execute_in_process(
        instance=orchestrated.instance, tags=build_range_tags(first, last), raise_on_error=False
    )
    assert not result.success
    return str(error_of_run(result))


@pytest.mark.sampled
def test_a_merge_of_all_partitions_names_the_window_that_is_not_landed(
    orchestrated: Orchestrated,
) -> None:
    """A window has its key before it is landed, so "all partitions" often have such a window."""
    landed, opened = orchestrated.land_and_open()
    error = materialise(orchestrated, "merge", landed, opened)
    end = LsnWindow.parse(landed).end
    assert f"window {opened} is not landed" in error
    assert f"landed through {end}" in error
    assert "resnapshot" not in error, "a snapshot would not help"


@pytest.mark.sampled
def test_a_window_of_wal_that_is_not_written_yet_does_not_hold_the_slot(
    orchestrated: Orchestrated,
) -> None:
    """Without the error, the run would wait until the server has written a terabyte."""
    capture = replace(orchestrated.capture, stream=StreamPolicy(total_seconds=5))
    limited = replace(orchestrated, capture=capture)
    limited.copy()
    limited.land()
    (landed,) = map(LsnWindow.parse, limited.windows())
    future = LsnWindow.of(1, landed.end, FAR).key
    limited.instance.add_dynamic_partitions(limited.capture.windows_name, [future])
    assert "the server has written WAL through" in materialise(limited, "capture", future, future)
    limited.commit("insert into b values (1, 1)")
    limited.land()
    assert future not in limited.windows()


@pytest.mark.parametrize("job", ["capture", "merge"])
def test_the_error_names_a_key_that_is_no_window(orchestrated: Orchestrated, job: str) -> None:
    orchestrated.copy()
    orchestrated.land()
    orchestrated.instance.add_dynamic_partitions(orchestrated.capture.windows_name, [TYPED])
    first, typed = orchestrated.windows()
    error = materialise(orchestrated, job, first, typed)
    assert f"Partition key {TYPED!r} is no window" in error


def test_the_newest_landed_window_is_captured_again_without_a_change(
    orchestrated: Orchestrated,
) -> None:
    orchestrated.copy()
    orchestrated.land()
    (landed,) = orchestrated.windows()
    job = orchestrated.location.repository.get_job(f"{NAME}_capture")
    result = job.execute_in_process(
        instance=orchestrated.instance, tags=build_range_tags(landed, landed), raise_on_error=False
    )
    assert result.success
    (event,) = result.get_asset_materialization_events()
    metadata = event.materialization.metadata["already_captured"]
    assert metadata == dg.BoolMetadataValue(True)
