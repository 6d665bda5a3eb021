"""States that are kept in a process: no change of another process is missed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import CommitProperties, DeltaTable

from pgcdc_assets.errors import TableDamaged
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables import state
from pgcdc_assets.tables.fence import fence_transactions
from pgcdc_assets.tables.state import advance_watermark, read_scd_state, read_watermark, table_path
from pgcdc_assets_tests.support.raw.epochs import EPOCH

_Read = Callable[[], Position | None]


@pytest.fixture
def path(zone: RawZone) -> str:
    """Create a table at LSN 16."""
    zone.epochs.append(EPOCH)
    path = table_path(zone.lake, zone.name, "shop", "items", 1)
    _create(zone, path, 16)
    return path


def _create(zone: RawZone, path: str, lsn: int) -> None:
    transactions = fence_transactions(zone, 1, Lsn(lsn), 1)
    DeltaTable.create(
        path,
        RawZone(zone.lake, "other").relations.table.schema,
        commit_properties=CommitProperties(app_transactions=transactions),
    )


@pytest.fixture(params=["watermark", "state"])
def read(request: pytest.FixtureRequest, zone: RawZone, path: str) -> _Read:
    """Return a function that reads the watermark."""

    def of_state() -> Position | None:
        found = read_scd_state(zone.lake, zone.name, path)
        return None if found is None else found.watermark

    if request.param == "state":
        return of_state
    return lambda: read_watermark(zone.lake, zone.name, "shop", "items", 1)


def test_an_unchanged_table_is_opened_once(
    read: _Read, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read() == (1, 16)
    monkeypatch.setattr(state, "open_table", None)
    assert read() == (1, 16)


def test_commits_are_noticed(read: _Read, zone: RawZone, path: str) -> None:
    for lsn in range(16, 40):
        assert read() == (1, lsn)
        advance_watermark(zone, path, Position(1, Lsn(lsn)), Position(1, Lsn(lsn + 1)))


def test_a_replaced_table_with_the_same_version_is_noticed(
    read: _Read, zone: RawZone, path: str
) -> None:
    for lsn in (16, 17, 18):
        assert read() == (1, lsn)
        shutil.rmtree(path)
        assert read() is None
        _create(zone, path, lsn + 1)


def test_a_restored_older_version_is_noticed(read: _Read, zone: RawZone, path: str) -> None:
    advance_watermark(zone, path, Position(1, Lsn(16)), Position(1, Lsn(17)))
    assert read() == (1, 17)
    Path(path, "_delta_log", f"{1:020d}.json").unlink()
    assert read() == (1, 16)


def test_a_damaged_log_is_noticed(read: _Read, zone: RawZone, path: str) -> None:
    advance_watermark(zone, path, Position(1, Lsn(16)), Position(1, Lsn(17)))
    assert read() == (1, 17)
    Path(path, "_delta_log", f"{0:020d}.json").unlink()
    with pytest.raises(TableDamaged):
        read()


def test_a_truncated_newest_commit_is_noticed(read: _Read, zone: RawZone, path: str) -> None:
    advance_watermark(zone, path, Position(1, Lsn(16)), Position(1, Lsn(17)))
    assert read() == (1, 17)
    commit = Path(path, "_delta_log", f"{1:020d}.json")
    commit.write_bytes(commit.read_bytes()[:20])
    with pytest.raises(TableDamaged):
        read()


def test_a_large_state_is_not_kept(
    zone: RawZone, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_MOST_FILES", -1)
    first = read_scd_state(zone.lake, zone.name, path)
    assert read_scd_state(zone.lake, zone.name, path) is not first
