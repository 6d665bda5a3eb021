"""`raw/ranges`: the ranges of incomplete snapshots."""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw import ranges
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.ranges import LandedRange
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.raw.rows import landed_range, relation, window

_NOW = dt.datetime.now(dt.UTC)


def _landed(start: int, table: str = "t", **values: object) -> LandedRange:
    found = replace(landed_range(start // 10), schema='a "b".c', table=table, began_at=_NOW)
    return replace(found, **{"read_at": _NOW} | values)  # type: ignore[arg-type]


def test_ranges_are_read_as_they_were_recorded_and_removed_by_table(zone: RawZone) -> None:
    store = zone.ranges
    assert store.all() == []
    last = _landed(90, end_page=None)
    for landed in (last, _landed(10), _landed(0), _landed(0, "u"), _landed(0, epoch=2)):
        store.append(landed)
    assert store.all() == [_landed(0), _landed(10), last, _landed(0, "u"), _landed(0, epoch=2)]
    assert last.pages_read == 10
    store.remove(1, TableName('a "b".c', "t"))
    assert RawZone(zone.lake, zone.name).ranges.all() == [_landed(0, "u"), _landed(0, epoch=2)]
    store.remove(1, TableName("no", "table"))
    loaded = store.table.load()
    assert loaded is not None
    assert len(loaded.file_uris()) == 2


def test_the_summary_of_an_unfinished_snapshot_has_its_recent_speed(
    zone: RawZone,
) -> None:
    def at(seconds: int) -> dt.datetime:
        return _NOW + dt.timedelta(seconds=seconds)

    newer = Lsn(5000)
    for landed in (
        _landed(0, began_at=at(0), read_at=at(500)),
        _landed(10, snapshot_lsn=newer, began_at=at(900), read_at=at(905)),
        _landed(90, snapshot_lsn=newer, began_at=at(902), read_at=at(910), end_page=None),
        _landed(0, "of another epoch", epoch=2),
    ):
        zone.ranges.append(landed)
    [copy] = zone.ranges.unfinished_copies(1)
    assert (copy.range_count, copy.pages_read, copy.page_count) == (3, 30, 100)
    assert (copy.row_count, copy.byte_count, copy.read_at) == (15, 150, at(910))
    # The speed is 20 pages in 10 seconds, and 70 pages are missing.
    assert copy.seconds_left == pytest.approx(35)


def test_concurrent_processes_lose_no_range_of_a_table(zone: RawZone) -> None:
    zone.ranges.table.load_or_create()

    def append(first: int) -> None:
        own = RawZone(zone.lake, zone.name).ranges
        for start in range(first, first + 40, 10):
            own.append(_landed(start))

    threads = [threading.Thread(target=append, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = [landed.start_page for landed in zone.ranges.all()]
    assert starts == [0, 10, 20, 30, 100, 110, 120, 130]


def test_maintenance_keeps_the_files_of_ranges_until_they_are_abandoned(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of a table may take longer than the retention of orphaned files."""
    zone.changes.land(window(1000, 1001), [])
    zone.snapshots.land_snapshot(1, Lsn(1000), relation(), 1, [])
    zone.ranges.append(_landed(0, read_at=_NOW - dt.timedelta(days=20)))
    spared = Path(zone.snapshots.table.uri, "part-0.parquet")
    orphan = Path(zone.snapshots.table.uri, "part-orphan.parquet")
    then = time.time() - 20 * 86400
    for path in (spared, orphan):
        path.write_bytes(b"x")
        os.utime(path, (then, then))
    maintain_raw_zone(zone, minimum_log_entries=1)
    assert spared.exists()
    assert not orphan.exists()
    monkeypatch.setattr(ranges, "ABANDONED_DAYS", 19)
    zone.changes.land(window(1001, 1002), [])
    maintain_raw_zone(zone, minimum_log_entries=1)
    assert zone.ranges.all() == []
    assert not spared.exists()


def test_a_range_is_written_a_few_times_however_many_ranges_a_table_has(zone: RawZone) -> None:
    """A table of four terabytes has 16,000 ranges."""
    store = zone.ranges
    starts = list(range(0, 320, 10))
    for start in starts:
        store.append(_landed(start))
    assert [landed.start_page for landed in store.all()] == starts
    loaded = store.table.load()
    assert loaded is not None
    assert len(loaded.file_uris()) <= 5
    written = Path(store.table.uri).rglob("*.parquet")
    rows = sum(pq.read_metadata(path).num_rows for path in written)
    assert rows <= len(starts) * 5


def test_maintenance_removes_old_log_entries_of_ranges(zone: RawZone) -> None:
    """Each range writes an entry, and each entry has a file of its own."""
    for start in range(0, 60, 10):
        zone.ranges.append(_landed(start))
    zone.changes.land(window(1000, 1001), [])
    log = Path(zone.ranges.table.uri, "_delta_log")
    then = time.time() - 2 * 86400
    for path in log.iterdir():
        os.utime(path, (then, then))
    maintain_raw_zone(zone, minimum_log_entries=1)
    assert len(list(log.glob("*.json"))) <= 3
    assert len(zone.ranges.all()) == 6
