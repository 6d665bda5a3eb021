"""Ticks of the merge sensor if nothing was landed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.sensors import quiet_ticks
from pgcdc_assets.orchestration.sensors.quiet_ticks import QuietTicks, read_versions
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.raw.epochs import EPOCH


@pytest.fixture(params=["s3_lake", "local"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> RawZone:
    """Return a raw zone with a window."""
    local = Lake(str(tmp_path / "lake"))
    zone = RawZone(local if request.param == "local" else request.getfixturevalue("s3_lake"), "c")
    zone.epochs.append(EPOCH)
    zone.changes.land(LsnWindow.of(1, 0, 100), [])
    return zone


@pytest.mark.parametrize("stored", ["s3_lake"], indirect=True)
def test_a_quiet_tick_asks_for_new_commits_alone(stored: RawZone, store_proxy: StoreProxy) -> None:
    quiet = QuietTicks()
    assert not quiet.is_quiet(stored)
    quiet.remember(stored, read_versions(stored))
    assert quiet.is_quiet(stored)
    store_proxy.forget()
    assert quiet.is_quiet(RawZone(stored.lake, stored.name))
    counts = store_proxy.counts()
    assert set(counts) == {"HEAD"}
    # Two for a table that exists, one for a table that does not.
    assert counts["HEAD"] <= 12


def test_a_landed_window_a_snapshot_and_time_end_the_quiet(
    stored: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = QuietTicks()
    quiet.remember(stored, read_versions(stored))
    stored.changes.land(LsnWindow.of(1, 100, 200), [])
    assert not quiet.is_quiet(stored)
    quiet.remember(stored, read_versions(stored))
    stored.snapshots.table.load_or_create()
    assert not quiet.is_quiet(stored)
    quiet.remember(stored, read_versions(stored))
    assert quiet.is_quiet(stored)
    monkeypatch.setattr(quiet_ticks, "SECONDS", -1.0)
    assert not quiet.is_quiet(stored)


def test_a_tick_that_finds_work_is_not_quiet(stored: RawZone) -> None:
    quiet = QuietTicks()
    quiet.remember(stored, read_versions(stored))
    quiet.forget(stored)
    assert not quiet.is_quiet(stored)
