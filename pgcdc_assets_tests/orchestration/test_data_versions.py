"""The data version of a merge, by its changes and the previous events in Dagster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import dagster as dg
import pytest

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.orchestration.data_versions import NO_CHANGE, data_version, version_tags
from pgcdc_assets.orchestration.metadata import THROUGH_METADATA

KEY = dg.AssetKey("table")
FIRST, SECOND = LsnWindow.of(1, 0, 100), LsnWindow.of(1, 100, 200)
IDLE = MergeReport("public", "t", 1, "path", Lsn(100), Lsn(200))


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def show(instance: dg.DagsterInstance, through: LsnWindow, version: str = "other") -> None:
    event = dg.AssetMaterialization(
        KEY,
        partition=through.key,
        metadata={THROUGH_METADATA: through.key},
        tags=version_tags(version),
    )
    instance.report_runless_asset_event(event)


def test_only_a_merge_with_changes_has_a_version(
    instance: dg.DagsterInstance,
) -> None:
    show(instance, FIRST)
    assert data_version(instance, KEY, IDLE, SECOND) == NO_CHANGE
    changed = data_version(instance, KEY, replace(IDLE, changes_read=1), SECOND)
    assert changed == "1:0/C8"
    copied = data_version(instance, KEY, replace(IDLE, snapshot_lsn=Lsn(150)), SECOND)
    assert copied not in (changed, NO_CHANGE), "a later snapshot, through the same window"
    assert data_version(instance, KEY, replace(IDLE, watermark_before=None), SECOND) != NO_CHANGE


def test_the_next_merge_reports_changes_that_a_killed_run_committed(
    instance: dg.DagsterInstance,
) -> None:
    committed = replace(IDLE, watermark_before=Lsn(200))
    assert data_version(instance, KEY, committed, SECOND) != NO_CHANGE, "no event exists yet"
    show(instance, FIRST)
    assert data_version(instance, KEY, committed, SECOND) != NO_CHANGE
    show(instance, SECOND, NO_CHANGE)
    assert data_version(instance, KEY, committed, SECOND) == NO_CHANGE


def test_a_repeated_merge_of_a_window_keeps_its_version(instance: dg.DagsterInstance) -> None:
    """A new version would hide the changes of the step's first attempt."""
    version = data_version(instance, KEY, replace(IDLE, changes_read=1), SECOND)
    show(instance, SECOND, version)
    again = replace(IDLE, watermark_before=Lsn(200))
    assert data_version(instance, KEY, again, SECOND) == version
    assert data_version(instance, KEY, again, LsnWindow.of(1, 200, 300)) == NO_CHANGE


def test_windows_of_an_earlier_epoch_do_not_hide_merges_of_the_next_epoch(
    instance: dg.DagsterInstance,
) -> None:
    show(instance, LsnWindow.of(1, 0, 1 << 40))
    third = LsnWindow.of(2, 0, 200)
    committed = replace(IDLE, watermark_before=Lsn(200))
    assert data_version(instance, KEY, committed, third) != NO_CHANGE
