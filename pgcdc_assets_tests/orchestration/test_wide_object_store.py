"""The tables of a publication in an object store are read side by side."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pgcdc_assets.errors import TableDamaged
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge import MergeFailure, opened_table
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.orchestration import state
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.table_threads import AT_A_TIME, map_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets_tests.support.raw.rows import zone_with_window

TABLES = tuple(CdcTable("shop", f"t{number}") for number in range(AT_A_TIME))


@pytest.fixture
def zone(s3_lake: Lake) -> RawZone:
    """Return a raw zone with an epoch and a window."""
    return zone_with_window(s3_lake)


class Meeting:
    """Readings of which each waits for the others; one after the other, they would fail."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=20)

    def read(self, *names: Any) -> None:
        self._barrier.wait()
        raise TableDamaged(path=str(names[-1]), reason="not read here")


def test_a_merge_opens_its_tables_side_by_side(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_table, "read_scd_state", Meeting(len(TABLES)).read)
    found = list(build_tasks(zone, TABLES, LsnWindow.of(1, 0, 100)))
    assert [each.table for each in found if isinstance(each, MergeFailure)] == [
        table.table for table in TABLES
    ]


def test_a_tick_reads_the_watermarks_side_by_side(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "read_watermark", Meeting(len(TABLES)).read)
    found = read_state(zone, CdcCapture("c", "p", TABLES)).tables
    assert [(each.table, each.is_broken) for each in found] == [(table, True) for table in TABLES]


def test_each_table_gets_its_own_watermark(zone: RawZone, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {table.table: Position(1, Lsn(n)) if n % 5 else None for n, table in enumerate(TABLES)}

    def read(lake: Lake, name: str, schema: str, table: str, scd: int) -> Position | None:
        return marks[table]

    monkeypatch.setattr(state, "read_watermark", read)
    found = read_state(zone, CdcCapture("c", "p", TABLES)).tables
    assert {each.table.table: each.watermark for each in found} == marks


def test_a_local_lake_is_read_by_one_thread(tmp_path: Any) -> None:
    threads = list(map_tables(Lake(str(tmp_path)), range(3), lambda _: threading.get_ident()))
    assert threads == [threading.get_ident()] * 3
