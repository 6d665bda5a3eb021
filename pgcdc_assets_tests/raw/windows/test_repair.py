"""After a restore, the records of windows are those of the restored `raw/changes`."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta.compaction import removals
from pgcdc_assets.raw.delta.scan import data_files
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.retention import remove_windows
from pgcdc_assets.raw.windows.rows import window_rows
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw.epochs import EPOCH
from pgcdc_assets_tests.support.raw.rows import COMMIT_TS, landed, transaction, window


def land(zone: RawZone, starts: Iterable[int], epoch: int = 1, size: int = 10) -> None:
    """Land windows, of which each third has no rows."""
    for start in starts:
        rows = [] if start // 10 % 3 == 0 else [transaction(start + 5, 2)]
        zone.changes.land(window(start, start + size, epoch), rows)


def copy(source: Path, target: Path, name: str) -> None:
    shutil.rmtree(target / name, ignore_errors=True)
    shutil.copytree(source / name, target / name)


def maintain(zone: RawZone, days: int = 0) -> None:
    """Save all records of windows; remove log entries if they are older than a day."""
    then = time.time() - days * 86_400
    for path in Path(zone.uri).rglob("*"):
        os.utime(path, (then, then))
    maintain_raw_zone(zone, minimum_files=1000, minimum_log_entries=1)


def fresh(zone: RawZone) -> RawZone:
    return RawZone(zone.lake, zone.name)


def check(zone: RawZone, epochs: Iterable[int] = (1,)) -> None:
    """Check that the windows are contiguous, and have the rows of the raw zone, each once."""
    for epoch in epochs:
        windows = fresh(zone).changes.windows(epoch)
        for before, after in pairwise(windows):
            assert before.window.end == after.window.start
        assert windows[-1].window.end == zone.changes.captured_through(epoch)
        assert sum(each.row_count for each in windows) == len(landed(zone, epoch))
        for each in windows:
            assert zone.changes.recount(each.window).is_complete


@pytest.fixture
def backup(zone: RawZone, tmp_path: Path) -> Path:
    """Copy `raw/changes` after ten windows, and `raw/windows` after ten more."""
    raw, backup = Path(zone.uri), tmp_path / "backup"
    land(zone, range(1000, 1100, 10))
    copy(raw, backup, "changes")
    land(zone, range(1100, 1200, 10))
    maintain(zone)
    copy(raw, backup, "windows")
    for name in ("changes", "windows"):
        copy(backup, raw, name)
    return backup


def test_the_windows_of_a_new_epoch_are_seen(zone: RawZone, backup: Path) -> None:
    """The slot is ahead of the restored lake, so `pgcdc renew` begins the epoch."""
    land(zone, range(9000, 9050, 10), epoch=2)
    assert [int(w.window.start) for w in zone.changes.windows(2)] == list(range(9000, 9050, 10))
    check(zone, (1, 2))


@pytest.mark.sampled
@pytest.mark.parametrize("count", [1, 9, 12, 40])
@pytest.mark.parametrize("size", [10, 35])
def test_windows_that_are_landed_again_are_counted_once(
    zone: RawZone, backup: Path, count: int, size: int
) -> None:
    """The slot still has the changes. The new windows have other borders."""
    land(zone, range(1100, 1100 + count * size, size), size=size)
    check(zone)
    assert [int(w.window.start) for w in zone.changes.windows(1)] == [
        *range(1000, 1100, 10),
        *range(1100, 1100 + count * size, size),
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("count", [0, 5, 40])
def test_lost_windows_are_forgotten_by_the_maintenance(
    zone: RawZone, backup: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    land(zone, range(9000, 9000 + 10 * count, 10), epoch=2)
    maintain(zone, days=2)
    assert "raw/windows" in caplog.text
    maintain(zone, days=2)
    check(zone, (1, 2) if count else (1,))
    caplog.clear()
    land(zone, range(9000 + 10 * count, 9500, 10), epoch=2)
    maintain(zone, days=2)
    check(zone, (1, 2))
    assert not caplog.text, "a lake is repaired once"


def test_retention_succeeds_after_a_restore(zone: RawZone, backup: Path) -> None:
    land(zone, range(9000, 9400, 10), epoch=2)
    report = remove_windows(zone, 2, Lsn(9400), COMMIT_TS.replace(month=3))
    assert report.floor == Lsn(9390)
    assert remove_windows(zone, 1, None, COMMIT_TS.replace(month=3)).floor == Lsn(1100)


@pytest.mark.sampled
@pytest.mark.parametrize("is_lost", [False, True], ids=["older", "lost"])
def test_records_that_only_the_lost_raw_windows_had_are_counted_again(
    zone: RawZone, tmp_path: Path, is_lost: bool
) -> None:
    """The maintenance has removed the log entries that `raw/windows` does not have."""
    raw = Path(zone.uri)
    land(zone, range(1000, 1100, 10))
    maintain(zone)
    copy(raw, tmp_path, "windows")
    land(zone, range(1100, 1300, 10))
    land(zone, range(9000, 9100, 10), epoch=2)
    maintain(zone, days=2)
    land(zone, range(9100, 9130, 10), epoch=2)
    rows, before = landed(zone), summaries(zone)
    shutil.rmtree(raw / "windows")
    if not is_lost:
        copy(tmp_path, raw, "windows")
    check(zone, (1, 2))
    assert landed(zone) == rows
    assert [w for w in summaries(zone) if w.row_count] == [w for w in before if w.row_count]


def summaries(zone: RawZone) -> list[WindowSummary]:
    return [each for epoch in (1, 2) for each in fresh(zone).changes.windows(epoch)]


def test_windows_below_the_floor_are_not_counted_again(zone: RawZone) -> None:
    land(zone, range(1000, 1200, 10))
    remove_windows(zone, 1, Lsn(1105), COMMIT_TS.replace(month=3))
    maintain(zone, days=2)
    land(zone, range(1200, 1230, 10))
    shutil.rmtree(Path(zone.uri, "windows"))
    check(zone)
    assert int(fresh(zone).changes.windows(1)[0].window.start) == 1100


def test_windows_without_rows_are_one_window_from_the_start_of_the_epoch(zone: RawZone) -> None:
    zone.epochs.append(replace(EPOCH, start_lsn=Lsn(1000)))
    for start in range(1000, 1100, 10):
        zone.changes.land(window(start, start + 10), [])
    maintain(zone, days=2)
    land(zone, range(1100, 1130, 10))
    shutil.rmtree(Path(zone.uri, "windows"))
    check(zone)
    windows = [each.window for each in fresh(zone).changes.windows(1)]
    assert windows == [
        window(1000, 1090),
        *(window(start, start + 10) for start in range(1090, 1130, 10)),
    ]


def test_a_stored_window_with_the_rows_of_another_window_is_removed(zone: RawZone) -> None:
    """An earlier release did not notice the restore: it has lost windows and kept wrong ones."""
    land(zone, range(1000, 1200, 10))
    maintain(zone, days=2)
    land(zone, range(1200, 1230, 10))
    index = zone.changes.window_index
    loaded = index.table.load_or_create()
    wrong = [WindowSummary(window(1000, 1035), 9), WindowSummary(window(1150, 1185), 9)]
    with index.table.writer() as writer:
        writer.write(window_rows(wrong))
        files = writer.finish()
    index.table.commit(
        loaded,
        files,
        removed=removals(data_files(loaded)),
        app_id=index.app_id,
        app_version=loaded.transaction_version(index.app_id) or 0,
        facts={f"{index.app_id}:entry": 7},
    )
    check(zone)


def test_a_window_whose_file_is_missing_is_an_error(zone: RawZone) -> None:
    land(zone, range(1000, 1100, 10))
    maintain(zone, days=2)
    shutil.rmtree(Path(zone.uri, "windows"))
    # Replaced files are in the folder too.
    for file in DeltaTable(str(Path(zone.uri, "changes"))).file_uris():
        Path(file).unlink()
    with pytest.raises(RawZoneError, match="a file of its log is missing"):
        fresh(zone).changes.windows(1)


def test_a_window_index_of_an_earlier_release_is_used_as_it_is(
    zone: RawZone, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no digest of the last copied log entry."""
    commit = type(zone.changes.table).commit

    def as_before(table: object, *args: object, **options: object) -> None:
        commit(table, *args, **(options | {"facts": None}))  # type: ignore[arg-type]

    land(zone, range(1000, 1100, 10))
    with monkeypatch.context() as patch:
        patch.setattr(type(zone.changes.table), "commit", as_before)
        maintain(zone)
    version = DeltaTable(zone.changes.window_index.table.uri).version()
    land(zone, range(1100, 1200, 10))
    check(zone)
    assert DeltaTable(zone.changes.window_index.table.uri).version() == version
    maintain(zone)
    check(zone)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_reader_with_an_older_version_is_no_restore(
    zone: RawZone, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the openings of the two tables, another process lands and saves."""
    land(zone, range(1000, 1050, 10))
    maintain(zone)
    land(zone, range(1050, 1060, 10))
    older = zone.changes.table.load()
    assert older is not None
    land(zone, range(1060, 1100, 10))
    maintain(zone, days=2)
    version = DeltaTable(zone.changes.window_index.table.uri).version()
    windows = zone.changes.window_index.windows(older, 1, 0)
    assert [int(w.window.start) for w in windows] == list(range(1000, 1100, 10))
    assert zone.changes.window_index.unsaved_entries(older) == 0
    assert not zone.changes.window_index.save(older)
    assert DeltaTable(zone.changes.window_index.table.uri).version() == version
    assert not caplog.text
