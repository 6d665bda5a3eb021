"""Several processes write to one raw zone at the same time."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from pgcdc_assets.errors import RawZoneError, WindowUnavailable
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw.rows import landed, relation, transaction, window

_SPAWN = multiprocessing.get_context("spawn")
_barrier: Any = None


def _take_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _meet() -> None:
    _barrier.wait(60)


@pytest.fixture(scope="module")
def two_processes() -> Any:
    barrier = _SPAWN.Barrier(2)
    with ProcessPoolExecutor(
        2, mp_context=_SPAWN, initializer=_take_barrier, initargs=(barrier,)
    ) as pool:
        yield pool


def _land(uri: str, start: int, end: int) -> str:
    zone = RawZone(Lake(uri), "test")
    _meet()
    try:
        report = zone.changes.land(window(start, end), [transaction(start, 3)], before_commit=_meet)
    except (RawZoneError, WindowUnavailable) as error:
        return str(error)
    return "already landed" if report.already_landed else "landed"


def test_one_of_two_processes_lands_the_window_and_the_other_reports_it_as_landed(
    zone: RawZone, two_processes: ProcessPoolExecutor
) -> None:
    """Both processes have written their files, and commit at the same time."""
    # A concurrent creation of the table would be a conflict of its own.
    zone.changes.table.load_or_create()
    for start in range(100, 2100, 100):
        ends = [start + 100] * 2
        outcomes = list(two_processes.map(_land, [zone.lake.uri] * 2, [start] * 2, ends))
        assert sorted(outcomes) == ["already landed", "landed"]
        assert zone.changes.captured_through(1) == Lsn(start + 100)
    assert landed(zone) == [(start, n) for start in range(100, 2100, 100) for n in range(3)]


def test_one_of_two_overlapping_windows_is_refused(
    zone: RawZone, two_processes: ProcessPoolExecutor
) -> None:
    # A concurrent creation of the table would be a conflict of its own.
    zone.changes.table.load_or_create()
    outcomes = list(two_processes.map(_land, [zone.lake.uri] * 2, [100, 100], [200, 300]))
    assert "landed" in outcomes
    (other,) = [outcome for outcome in outcomes if outcome != "landed"]
    # If the longer window was landed, the shorter window is not in the raw zone.
    assert "overlaps" in other or "no window with these borders" in other
    assert landed(zone) == [(100, 0), (100, 1), (100, 2)]


def _land_many(uri: str, count: int) -> int:
    zone = RawZone(Lake(uri), "test")
    _meet()
    for n in range(count):
        zone.changes.land(window(1000 + n, 1001 + n), [transaction(1000 + n, 2)])
    return count


def _maintain_repeatedly(uri: str, through: int) -> int:
    zone = RawZone(Lake(uri), "test")
    merged = 0
    _meet()
    while (zone.changes.captured_through(1) or 0) < through:
        merged += maintain_raw_zone(zone, minimum_files=2, minimum_log_entries=2).files_merged
    return merged


def test_maintenance_concurrent_with_landings_neither_loses_nor_duplicates_a_row(
    zone: RawZone, two_processes: ProcessPoolExecutor
) -> None:
    landing = two_processes.submit(_land_many, zone.lake.uri, 60)
    maintenance = two_processes.submit(_maintain_repeatedly, zone.lake.uri, 1060)
    assert landing.result(120) == 60
    assert maintenance.result(120) > 10
    assert landed(zone) == [(1000 + n, ordinal) for n in range(60) for ordinal in range(2)]
    assert [w.window.start for w in zone.changes.windows(1)] == [1000 + n for n in range(60)]
    assert zone.changes.captured_through(1) == Lsn(1060)


def _compact(uri: str) -> int:
    zone = RawZone(Lake(uri), "test")
    _meet()
    return sum(report.files_before for report in zone.changes.compact(2))


def test_two_compactions_at_once_merge_each_file_once(
    zone: RawZone, two_processes: ProcessPoolExecutor
) -> None:
    for n in range(10):
        zone.changes.land(window(100 + n, 101 + n), [transaction(100 + n, 2)])
    list(two_processes.map(_compact, [zone.lake.uri] * 2))
    assert landed(zone) == [(100 + n, ordinal) for n in range(10) for ordinal in range(2)]


def _describe(uri: str, *names: str) -> int:
    zone = RawZone(Lake(uri), "test")
    version = zone.relations.register(1, relation("orders", 16400, *names), Lsn(100))
    _meet()
    zone.relations.flush()
    return version


def test_two_processes_that_register_the_same_relation_store_one_version(
    zone: RawZone, two_processes: ProcessPoolExecutor
) -> None:
    assert list(two_processes.map(_describe, [zone.lake.uri] * 2)) == [1, 1]
    assert [v.version for v in zone.relations.versions(1)] == [1]
