"""Merges after a restore of an older raw zone: no change is skipped unnoticed."""

from __future__ import annotations

import datetime as dt
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import RawExpired, RawZoneError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.merge import MergeFailure, merge_tables, rebuild_table
from pgcdc_assets.orchestration.jobs.maintenance import lowest_position
from pgcdc_assets.orchestration.sensors.restored_lakes import RestoredLakes
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw.delta.newest_versions import NewestVersions
from pgcdc_assets.raw.retention import remove_windows
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import MessagePolicy
from pgcdc_assets.tables import state
from pgcdc_assets.tables.messages import MessageTable
from pgcdc_assets.tables.state import ScdState, table_path
from pgcdc_assets.tables.tables_ahead import find_tables_ahead
from pgcdc_assets_tests.support.merge.history import Change, Landing, insert

pytestmark = pytest.mark.spark

_ITEMS = CdcTable("shop", "items", scd=(1, 2))
_OTHER = CdcTable("shop", "other")
_LOST = [insert("3", "c")], [insert("4", "d")]

Merge = Callable[[], list[str]]


@pytest.fixture
def landing(zone: RawZone) -> Landing:
    landing = Landing.of_two_tables(zone)
    landing.land([insert("2", "b")])
    return landing


@pytest.fixture
def merge_all(spark: SparkSession, landing: Landing) -> Merge:
    """Return a function that merges all tables, and returns the tables that are refused."""

    def merge() -> list[str]:
        found = merge_tables(spark, landing.zone, [_ITEMS, _OTHER], landing.windows[-1])
        refused = []
        for each in found:
            if isinstance(each, MergeFailure):
                assert isinstance(each.error, RawZoneError), each.error
                refused.append(str(each.error))
        return refused

    return merge


def _restore_older(landing: Landing, folder: Path, merge: Merge) -> Lsn:
    """Restore the raw zone from before a merged window; return the end of the window."""
    raw = Path(landing.zone.changes.table.uri).parent
    assert not merge()
    shutil.copytree(raw, folder)
    end = landing.land(*_LOST).end
    assert not merge()
    shutil.rmtree(raw)
    shutil.copytree(folder, raw)
    landing.zone = RawZone(landing.zone.lake, landing.zone.name)
    landing.windows.pop()
    landing.lsn = int(landing.windows[-1].end)
    return end


def _renewed_and_restored(landing: Landing, folder: Path, merge: Merge) -> None:
    """Restore the raw zone from before an epoch that is merged, and nothing waits in it."""
    raw = Path(landing.zone.changes.table.uri).parent
    assert not merge()
    shutil.copytree(raw, folder)
    before = landing.lsn
    landing.epoch, landing.lsn = 2, landing.lsn + 0x100
    landing.begin([["1", "a"], ["2", "b"], ["3", "of the second epoch"]])
    landing.land(*_LOST)
    assert not merge()
    shutil.rmtree(raw)
    shutil.copytree(folder, raw)
    landing.zone = RawZone(landing.zone.lake, landing.zone.name)
    landing.windows.pop()
    landing.epoch, landing.lsn = 1, before


def _rows(spark: SparkSession, landing: Landing, scd: int) -> list[tuple[int, str]]:
    path = table_path(landing.zone.lake, landing.zone.name, "shop", "items", scd)
    rows = spark.read.format("delta").load(path)
    if scd == 2:
        rows = rows.where("_is_current")
    return sorted((row["id"], row["v"]) for row in rows.collect())


def _broken(landing: Landing) -> list[str]:
    capture = CdcCapture(landing.zone.name, "pub", tables=(_ITEMS, _OTHER))
    tables = read_state(landing.zone, capture).tables
    assert all(each.needs_merge for each in tables if each.is_broken)
    return [f"{each.table.table} {each.scd}" for each in tables if each.is_broken]


@pytest.mark.sampled
def test_changes_of_a_restored_source_below_the_watermark_are_not_skipped_silently(
    spark: SparkSession, landing: Landing, tmp_path: Path, merge_all: Merge
) -> None:
    """The source was restored to the time of the raw zone, and has other changes since then."""
    _restore_older(landing, tmp_path / "older", merge_all)
    changes: list[list[Change]] = [[], [insert("5", "of the restored source")]]
    for rows in changes:
        captured = landing.land(rows).end if rows else landing.windows[-1].end
        assert _broken(landing) == ["items 1", "items 2"]
        refused = merge_all()
        assert len(refused) == 2
        for text in refused:
            assert "merged through" in text and f"ends at {captured} of epoch 1" in text
            assert text.endswith(f"pgcdc rebuild test shop.items --through {captured}")
    for scd in _ITEMS.scd:
        rebuild_table(spark, landing.zone, _ITEMS, scd, captured)
    landing.land([insert("6", "f")], [])
    assert not merge_all() and not _broken(landing)
    expected = [(1, "a"), (2, "b"), (5, "of the restored source"), (6, "f")]
    assert [_rows(spark, landing, scd) for scd in _ITEMS.scd] == [expected] * 2


@pytest.mark.sampled
def test_tables_of_an_epoch_that_the_raw_zone_lacks_stop(
    spark: SparkSession,
    landing: Landing,
    tmp_path: Path,
    merge_all: Merge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source was restored too, and its slot of the first epoch continues."""
    _renewed_and_restored(landing, tmp_path / "older", merge_all)
    capture = CdcCapture(landing.zone.name, "pub", tables=(_ITEMS, _OTHER))
    # As in a new process.
    monkeypatch.setattr(state, "STATES", NewestVersions[ScdState](100))
    monkeypatch.setattr(state, "_POSITIONS", NewestVersions[Position | None](100))
    paths = [
        table_path(landing.zone.lake, landing.zone.name, each.schema, each.table, scd)
        for each in (_ITEMS, _OTHER)
        for scd in each.scd
    ]
    error = find_tables_ahead(landing.zone, capture).error
    assert error is not None
    text = str(error)
    assert (
        text.endswith(
            f"move {', '.join(paths)} to another place, and the next merge creates the tables again"
        )
        and "pgcdc rebuild" not in text
    )
    assert lowest_position(landing.zone, capture) is None
    landing.land([insert("5", "of the restored source")])
    refused = merge_all()
    assert len(refused) == 3 and all("of epoch 2" in each for each in refused)
    for path in paths:
        shutil.move(path, tmp_path / path.replace("/", "_"))
    assert find_tables_ahead(landing.zone, capture) == (None, True)
    assert not merge_all() and not _broken(landing)
    expected = [(1, "a"), (2, "b"), (5, "of the restored source")]
    assert [_rows(spark, landing, scd) for scd in _ITEMS.scd] == [expected] * 2


@pytest.mark.sampled
def test_a_rebuild_of_a_table_ahead_that_lacks_windows_names_a_remedy_that_works(
    spark: SparkSession, landing: Landing, tmp_path: Path, merge_all: Merge
) -> None:
    """No window is captured while a table is ahead, so a new snapshot comes too late."""
    end = landing.windows[-1].end
    assert not merge_all()
    later = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    remove_windows(landing.zone, 1, end, later)
    _restore_older(landing, tmp_path / "older", merge_all)
    for scd in _ITEMS.scd:
        path = table_path(landing.zone.lake, landing.zone.name, "shop", "items", scd)
        with pytest.raises(RawExpired, match=f"move {path} to another folder.*pgcdc resnapshot"):
            rebuild_table(spark, landing.zone, _ITEMS, scd, end)
        shutil.move(path, tmp_path / f"items{scd}")
    landing.copy([["1", "a"], ["5", "e"]], at=landing.lsn)
    landing.land([insert("6", "f")])
    assert not merge_all() and not _broken(landing)
    expected = [(1, "a"), (5, "e"), (6, "f")]
    assert [_rows(spark, landing, scd) for scd in _ITEMS.scd] == [expected] * 2


@pytest.mark.sampled
def test_tables_that_cannot_be_read_are_looked_at_again(
    landing: Landing, tmp_path: Path, merge_all: Merge
) -> None:
    """They do not stop the capture: neither a damaged SCD table nor a damaged table of messages."""
    zone, capture = landing.zone, CdcCapture(landing.zone.name, "pub", tables=(_ITEMS, _OTHER))
    capture = replace(capture, messages=MessagePolicy())
    _restore_older(landing, tmp_path / "older", merge_all)
    end = landing.windows[-1].end_position
    MessageTable(zone).append(end, commits_empty=True)
    entries = []
    for scd in _ITEMS.scd:
        log = Path(table_path(zone.lake, zone.name, "shop", "items", scd), "_delta_log")
        entries.append(max(log.glob("*.json")))
    entries.append(max(Path(MessageTable(zone).table.uri, "_delta_log").glob("*.json")))
    texts = [entry.read_text() for entry in entries]
    restored = RestoredLakes()
    for entry, text in zip(entries, texts, strict=True):
        entry.write_text(text[:40])
    restored.check(landing.zone, capture, end)
    for entry, text in zip(entries, texts, strict=True):
        entry.write_text(text)
    with pytest.raises(RawZoneError, match=r"shop\.items \(scd2\)"):
        restored.check(landing.zone, capture, end)


@pytest.mark.sampled
def test_a_merge_continues_when_the_changes_are_captured_again(
    spark: SparkSession, landing: Landing, tmp_path: Path, merge_all: Merge
) -> None:
    """The source is as before, and the windows have other borders."""
    end = _restore_older(landing, tmp_path / "older", merge_all)
    landing.land(_LOST[0])
    assert len(merge_all()) == 2
    assert landing.land(_LOST[1], [insert("5", "e")]).end > end
    assert not merge_all() and not _broken(landing)
    expected = [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]
    assert [_rows(spark, landing, scd) for scd in _ITEMS.scd] == [expected] * 2
