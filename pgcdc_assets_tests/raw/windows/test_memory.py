"""The windows of an epoch fit into memory, also a hundred thousand with a hundred tables each."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable

import pyarrow as pa
import pytest

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge.snapshot_time import find_snapshot_time
from pgcdc_assets.raw.retention import remove_windows
from pgcdc_assets.raw.schema import WINDOWS
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.windows.rows import parse_row
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.raw.rows import COMMIT_TS, relation, transaction, window

WINDOW_COUNT = 1000
END = Lsn(WINDOW_COUNT * 100)
TABLES = [TableName("shop", f"table_{number:03d}") for number in range(100)]


def _counts(number: int) -> dict[str, dict[str, int]]:
    return {
        table.record_name: {"I": number * index % 50 + 1, "U": (number + index) % 20 + 1}
        for index, table in enumerate(TABLES)
    }


def _row(number: int) -> dict[str, object]:
    start, end = number * 100, number * 100 + 100
    return {
        "epoch": 1,
        "window": LsnWindow.of(1, start, end).key,
        "start_lsn": start,
        "end_lsn": end,
        "row_count": 0,
        "transaction_count": 1,
        "counts": json.dumps(_counts(number)),
        "last_commit_ts": COMMIT_TS,
    }


@pytest.fixture
def wide(zone: RawZone) -> RawZone:
    """Return a zone with many windows in `raw/windows` and one in the log."""
    index = zone.changes.window_index.table
    loaded = index.load_or_create()
    with index.writer() as writer:
        rows = [_row(number) for number in range(WINDOW_COUNT)]
        writer.write(pa.Table.from_pylist(rows, schema=WINDOWS))
        files = writer.finish()
    index.commit(loaded, files)
    zone.changes.land(window(END, END + 100), [transaction(END + 5, 2)])
    return zone


def _bytes_per_window(call: Callable[[], object]) -> float:
    """Return the most memory that a call uses at once."""
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1] / WINDOW_COUNT
    finally:
        tracemalloc.stop()
        del result


def _snapshot() -> Snapshot:
    return Snapshot(1, END, "shop", "orders", relation().relation_id, 1, 0)


CALLS: dict[str, Callable[[RawZone], object]] = {
    "retention": lambda zone: remove_windows(zone, 1, END, COMMIT_TS.replace(month=2)),
    "snapshot time": lambda zone: find_snapshot_time(zone, _snapshot(), None, is_first=True),
    "windows": lambda zone: zone.changes.landed_windows(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_counts_that_are_not_needed_are_not_read(wide: RawZone, name: str) -> None:
    assert _bytes_per_window(lambda: CALLS[name](wide)) < 2_500


def test_counts_are_parsed_when_they_are_used_and_share_their_parts(wide: RawZone) -> None:
    def read() -> list[WindowSummary]:
        return wide.changes.windows(1)

    def count() -> list[WindowSummary]:
        windows = read()
        assert sum(each.count_changes(TABLES) for each in windows) > 100 * WINDOW_COUNT
        return windows

    assert _bytes_per_window(read) < 10_000
    assert _bytes_per_window(count) < 12_000


def test_stored_counts_are_equal_to_the_counts_of_a_record() -> None:
    stored = parse_row({**_row(7), "first_commit_lsn": None, "last_commit_lsn": None})
    counts = _counts(7)
    assert stored.counts == counts
    assert counts == stored.counts
    assert stored.counts.get("shop.none") is None
    assert list(stored.counts) == list(counts)
    assert len(stored.counts) == len(counts)
    assert stored.as_record()["counts"] == counts
    assert WindowSummary(stored.window, 0, 1, counts, None, None, None, COMMIT_TS) == stored
