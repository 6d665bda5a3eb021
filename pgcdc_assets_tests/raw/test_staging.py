"""Staging folders are removed at the end of the block, and folders of killed processes later."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.staging import REBUILD, VERIFY, remove_folder, remove_stale, staging_root

DAY = dt.timedelta(days=1)


def fill(root: str) -> Path:
    folder = Path(root, "scd1", "public", "t", "_delta_log")
    folder.mkdir(parents=True)
    (folder / "0.json").write_text("{}")
    return Path(root)


def test_a_staging_folder_is_removed_after_success_and_failure(lake: Lake) -> None:
    with staging_root(lake, "test", VERIFY) as root:
        made = fill(root)
        assert str(made).startswith(lake.path("test", "verify"))
    assert not made.exists()
    with pytest.raises(RuntimeError), staging_root(lake, "test", VERIFY) as root:
        made = fill(root)
        raise RuntimeError
    assert not made.exists()


def test_an_empty_staging_folder_is_removed(lake: Lake) -> None:
    with staging_root(lake, "test", REBUILD):
        pass
    remove_folder(lake, lake.path("test", "nothing"))
    assert remove_stale(lake, "test", DAY) == 0


def test_only_old_staging_folders_are_stale(lake: Lake) -> None:
    folder = Path(lake.path("test", REBUILD))
    yesterday = (dt.datetime.now(dt.UTC) - 1.5 * DAY).strftime("%Y%m%dT%H%M%SZ")
    just_now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    for name in (f"{yesterday}-0123abcd", f"{just_now}-0123abcd", "notes"):
        fill(str(folder / name))
    assert remove_stale(lake, "test", DAY) == 1
    assert sorted(path.name for path in folder.iterdir()) == [f"{just_now}-0123abcd", "notes"]


def test_a_folder_that_cannot_be_removed_does_not_stop_the_removal_of_the_next(
    lake: Lake, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one of another user. Each rebuild and each `pgcdc upkeep` would fail."""
    folder = Path(lake.path("test", REBUILD))
    yesterday = (dt.datetime.now(dt.UTC) - 1.5 * DAY).strftime("%Y%m%dT%H%M%SZ")
    fill(str(folder / f"{yesterday}-11111111"))
    stuck = folder / f"{yesterday}-00000000"
    stuck.touch()
    assert remove_stale(lake, "test", DAY) == 1
    assert [*folder.iterdir()] == [stuck]
    assert f"{stuck} was not removed" in caplog.text
