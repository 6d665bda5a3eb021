"""Merges after a restore of an older raw zone: no change is skipped unnoticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import MergeFailure, merge_tables, rebuild_table
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.tables.state import table_path
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


def _rows(spark: SparkSession, landing: Landing, scd: int) -> list[tuple[int, str]]:
    path = table_path(landing.zone.lake, landing.zone.name, "shop", "items", scd)
    rows = spark.read.format("delta").load(path)
    if scd == 2:
        rows = rows.where("_is_current")
    return sorted((row["id"], row["v"]) for row in rows.collect())


def _broken(landing: Landing) -> list[str]:
    capture = CdcCapture(landing.zone.name, "pub", tables=(_ITEMS, _OTHER))
    states = read_state(landing.zone, capture).tables
    assert all(state.needs_merge for state in states if state.is_broken)
    return [f"{state.table.table} {state.scd}" for state in states if state.is_broken]


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
