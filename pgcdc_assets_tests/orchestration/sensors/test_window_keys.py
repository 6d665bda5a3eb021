"""Partition keys that no capture of the lake has added: typed in the UI, or of an earlier lake."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.checks.raw import WINDOW_CHECKS
from pgcdc_assets.orchestration.partitions import build_range_tags
from pgcdc_assets_tests.orchestration.conftest import Orchestrated

pytestmark = pytest.mark.postgres

FAR = 1 << 40
TYPED = "typed by hand"


def add_keys(orchestrated: Orchestrated, *keys: str) -> None:
    orchestrated.instance.add_dynamic_partitions(orchestrated.capture.windows_name, list(keys))


@pytest.mark.parametrize(
    "keys",
    [
        [TYPED],
        [LsnWindow.of(epoch, 1, 2).key for epoch in range(2, 60)],
        [LsnWindow.of(1, FAR, FAR + 8).key],
        [LsnWindow.of(1, 1, 2).key],
    ],
    ids=[
        "no window",
        "of epochs of another lake",
        "of the WAL of another server",
        "of an earlier lake",
    ],
)
def test_keys_of_no_window_of_the_lake_are_deleted_and_delay_no_window(
    orchestrated: Orchestrated, keys: list[str]
) -> None:
    orchestrated.copy()
    orchestrated.land()
    (first,) = orchestrated.windows()
    add_keys(orchestrated, *keys)
    orchestrated.commit("insert into b values (1, 1)")
    orchestrated.land()
    before, opened = map(LsnWindow.parse, orchestrated.windows())
    assert (before.key, opened.start) == (first, before.end)
    assert opened.end < FAR


def test_merges_continue_beside_a_key_that_is_no_window(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    orchestrated.land()
    (landed,) = orchestrated.windows()
    add_keys(orchestrated, TYPED)
    (request,) = orchestrated.tick("merges").run_requests
    assert request.tags.items() >= build_range_tags(landed, landed).items()


def test_no_merge_is_requested_for_a_key_of_an_earlier_lake(orchestrated: Orchestrated) -> None:
    """The first sync of a new lake would end with an error."""
    orchestrated.copy()
    add_keys(orchestrated, LsnWindow.of(1, 1, 2).key)
    assert not orchestrated.tick("merges").run_requests
    orchestrated.land()
    (landed,) = orchestrated.windows()
    (request,) = orchestrated.tick("merges").run_requests
    assert request.tags.items() >= build_range_tags(landed, landed).items()


def test_a_key_stays_while_a_capture_runs(orchestrated: Orchestrated) -> None:
    """A running capture adds keys of windows, which the evaluation may not know yet."""
    orchestrated.copy()
    (request,) = orchestrated.tick("lag").run_requests
    orchestrated.start_run("capture", dict(request.tags))
    key = LsnWindow.of(1, FAR, FAR + 8).key
    add_keys(orchestrated, key)
    orchestrated.tick("lag")
    assert key in orchestrated.windows()


@pytest.mark.sampled
def test_a_window_that_was_open_at_the_end_of_its_epoch_is_not_merged(
    orchestrated: Orchestrated,
) -> None:
    landed, opened = orchestrated.land_and_open()
    database, zone, capture = orchestrated.database, orchestrated.zone, orchestrated.capture
    database.drop_slots()
    settings, source = database.settings(), (capture.slot, capture.publication)
    assert renew_epoch(settings, zone, *source).epoch == 2
    snapshot_tables(settings, zone, *source, capture.table_names)
    (request,) = orchestrated.tick("merges").run_requests
    assert request.tags.items() >= build_range_tags(landed, landed).items()
    orchestrated.tick("lag")
    assert landed in orchestrated.windows()
    assert opened not in orchestrated.windows()


@pytest.mark.sampled
@pytest.mark.parametrize("is_capturing", [False, True])
def test_a_window_whose_run_was_killed_after_the_commit_gets_its_records(
    orchestrated: Orchestrated, is_capturing: bool
) -> None:
    """A running capture records its windows itself."""
    orchestrated.copy()
    orchestrated.land()
    orchestrated.commit("insert into b values (1, 1)")
    (request,) = orchestrated.tick("lag").run_requests
    window = LsnWindow.parse(request.partition_key)
    if is_capturing:
        orchestrated.start_run("capture", dict(request.tags))
    # A process that is killed here has recorded nothing.
    capture = orchestrated.capture
    settings = orchestrated.database.settings()
    capture_window(settings, orchestrated.zone, capture.slot, capture.publication, window)

    recorded = of_window(orchestrated.tick("lag"), window)
    assert recorded == (set() if is_capturing else {"materialised", *WINDOW_CHECKS})
    again = of_window(orchestrated.tick("lag"), window)
    assert again == set()


def of_window(data: Any, window: LsnWindow) -> set[str]:
    """Return what an evaluation records about a window."""
    return {
        event.check_name if isinstance(event, dg.AssetCheckEvaluation) else "materialised"
        for event in data.asset_events
        if not isinstance(event, dg.AssetObservation) and event.partition == window.key
    }
