"""Old windows are deleted in one commit. The error for a deleted window names the floor."""

from __future__ import annotations

import datetime as dt
import json
import re
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from pgcdc_assets.errors import RawExpired, RawZoneError, TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.retention import (
    RetentionReport,
    remove_partial_snapshots,
    remove_snapshots,
    remove_windows,
)
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.raw.rows import COMMIT_TS, landed, relation, transaction, window

DAY = dt.timedelta(days=1)
LATER = COMMIT_TS + 10 * DAY


def land_days(
    zone: RawZone, days: int, epoch: int = 1, *, day: int = 0, shown: int | None = None
) -> None:
    """Land one window per day. Each window has 10 LSNs and two changes.

    Args:
        day: the first day.
        shown: the day by the source's clock; None: the same.
    """
    for each in range(day, day + days):
        start = 1000 + 10 * each
        time = COMMIT_TS + (each if shown is None else shown) * DAY
        rows = transaction(start + 5, 2, commit_ts=time)
        zone.changes.land(window(start, start + 10, epoch), [rows])


def starts(zone: RawZone, epoch: int = 1) -> list[int]:
    return [int(summary.window.start) for summary in zone.changes.windows(epoch)]


def test_only_old_merged_windows_are_deleted(zone: RawZone) -> None:
    land_days(zone, 6)
    assert zone.changes.kept_from(1) is None
    report = remove_windows(zone, 1, Lsn(1060), COMMIT_TS + 2.5 * DAY)
    assert report == RetentionReport(1, Lsn(1030), window_count=3, row_count=6, file_count=3)
    assert zone.changes.kept_from(1) == Lsn(1030)
    assert starts(zone) == [1030, 1040, 1050]
    assert [lsn for lsn, _ in landed(zone)] == [1035, 1035, 1045, 1045, 1055, 1055]
    again = remove_windows(zone, 1, Lsn(1060), COMMIT_TS + 2.5 * DAY)
    assert again == RetentionReport(1, Lsn(1030))


def test_no_window_above_the_lowest_watermark_is_deleted(zone: RawZone) -> None:
    land_days(zone, 6)
    assert remove_windows(zone, 1, Lsn(1029), LATER).floor == Lsn(1020)
    assert starts(zone) == [1020, 1030, 1040, 1050]


def test_recent_windows_are_kept_and_an_empty_zone_is_accepted(zone: RawZone) -> None:
    assert remove_windows(zone, 1, Lsn(1060), LATER) == RetentionReport(1, None)
    land_days(zone, 2)
    assert remove_windows(zone, 1, Lsn(1020), COMMIT_TS) == RetentionReport(1, None)
    assert starts(zone) == [1000, 1010]


def test_a_file_across_the_floor_keeps_its_later_rows(zone: RawZone) -> None:
    land_days(zone, 6)
    before = landed(zone)
    maintain_raw_zone(zone, minimum_files=2)
    loaded = zone.changes.table.load()
    assert loaded is not None
    assert len(loaded.file_uris()) == 1
    remove_windows(zone, 1, Lsn(1040), LATER)
    assert landed(zone) == [row for row in before if row[0] >= 1040]
    assert zone.changes.summary(window(1040, 1050)).row_count == 2
    assert zone.changes.summary(window(1050, 1060)).row_count == 2


def test_windows_without_rows_are_removed_with_the_next_window_with_rows(zone: RawZone) -> None:
    zone.changes.land(window(990, 1000), [])
    land_days(zone, 2)
    zone.changes.land(window(1020, 1030), [])
    assert remove_windows(zone, 1, Lsn(1030), LATER).floor == Lsn(1020)
    assert starts(zone) == [1020]


@pytest.mark.parametrize("years", [70, -40])
def test_a_commit_with_a_wrong_clock_neither_ends_the_retention_nor_is_removed_early(
    zone: RawZone, years: int
) -> None:
    """The source's clock was wrong for the commits of days 3 and 9, and right before and after."""
    wrong = COMMIT_TS.replace(year=COMMIT_TS.year + years)
    for day in range(10):
        start = 1000 + 10 * day
        time = wrong if day in (3, 9) else COMMIT_TS + day * DAY
        zone.changes.land(window(start, start + 10), [transaction(start + 5, 2, commit_ts=time)])
    for days, floor in ((2.5, 1030), (2.5, 1030), (3.5, 1030), (4.5, 1050), (8.5, 1090)):
        report = remove_windows(zone, 1, Lsn(1100), COMMIT_TS + days * DAY)
        assert report.floor == Lsn(floor)
    assert starts(zone) == [1090]
    # A later window shows that the window of day 9 is old.
    land_days(zone, 1, day=10)
    assert remove_windows(zone, 1, Lsn(1110), COMMIT_TS + 10.5 * DAY).floor == Lsn(1110)


def test_commits_without_a_time_are_kept_as_long_as_the_next_commit(zone: RawZone) -> None:
    """A subscription copies its tables first, by transactions without a time."""
    no_time = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
    for day in range(2):
        start = 1000 + 10 * day
        zone.changes.land(window(start, start + 10), [transaction(start + 5, 2, commit_ts=no_time)])
    assert remove_windows(zone, 1, Lsn(1020), COMMIT_TS).floor is None
    land_days(zone, 2, day=2)
    assert remove_windows(zone, 1, Lsn(1040), COMMIT_TS + 1.5 * DAY).floor is None
    assert starts(zone) == [1000, 1010, 1020, 1030]
    assert remove_windows(zone, 1, Lsn(1040), COMMIT_TS + 2.5 * DAY).floor == Lsn(1030)


def test_a_time_of_the_future_that_has_come_delays_the_removal_of_the_next_windows(
    zone: RawZone,
) -> None:
    for day, shown in enumerate((0, 3, 2, 3, 4)):
        land_days(zone, 1, day=day, shown=shown)
    assert remove_windows(zone, 1, Lsn(1050), COMMIT_TS + 2.5 * DAY).floor == Lsn(1010)
    assert remove_windows(zone, 1, Lsn(1050), COMMIT_TS + 3.5 * DAY).floor == Lsn(1040)


def test_other_epochs_are_not_changed(zone: RawZone) -> None:
    land_days(zone, 3)
    land_days(zone, 3, epoch=2)
    maintain_raw_zone(zone, minimum_files=2)
    assert remove_windows(zone, 1, None, LATER).row_count == 6
    assert starts(zone, 1) == []
    assert starts(zone, 2) == [1000, 1010, 1020]
    assert len(landed(zone, 2)) == 6


def test_a_removed_window_is_refused_with_the_floor(zone: RawZone) -> None:
    """H5: an old partition is materialised again."""
    land_days(zone, 4)
    remove_windows(zone, 1, Lsn(1020), LATER)
    with pytest.raises(RawExpired, match=r"0001-.*removed: the oldest LSN .* is 0/3FC"):
        zone.changes.summary(window(1000, 1010))
    with pytest.raises(RawExpired):
        zone.changes.land(window(1000, 1010), [])
    assert zone.changes.summary(window(1020, 1030)).row_count == 2


def test_landing_and_maintenance_continue_after_a_removal_of_windows(zone: RawZone) -> None:
    land_days(zone, 4)
    remove_windows(zone, 1, Lsn(1040), LATER)
    assert starts(zone) == []
    assert zone.changes.captured_through(1) == Lsn(1040)
    zone.changes.land(window(1040, 1050), [transaction(1045, 1)])
    maintain_raw_zone(zone, minimum_files=1, minimum_log_entries=1)
    assert starts(zone) == [1040]
    assert landed(zone) == [(1045, 0)]
    assert zone.changes.kept_from(1) == Lsn(1040)


def test_windows_with_rows_that_another_program_has_deleted_are_removed(zone: RawZone) -> None:
    """Personal data was deleted by hand. Retention would wait for these rows without end."""
    land_days(zone, 4)
    by_hand = zone.changes.table.load()
    assert by_hand is not None
    by_hand.delete("commit_lsn = 1015 AND ordinal = 1")
    by_hand.delete("commit_lsn = 1025")
    report = remove_windows(zone, 1, Lsn(1020), LATER)
    assert report == RetentionReport(1, Lsn(1020), 2, row_count=3, file_count=2, missing_count=1)
    report = remove_windows(zone, 1, Lsn(1030), LATER)
    assert report == RetentionReport(1, Lsn(1030), 1, missing_count=2)
    assert starts(zone) == [1030]
    assert [lsn for lsn, _ in landed(zone)] == [1035, 1035]


def test_no_window_is_deleted_if_another_program_has_added_rows(zone: RawZone) -> None:
    land_days(zone, 4)
    rows = DeltaTable(zone.changes.table.uri).to_pyarrow_table()
    added = rows.filter(pc.equal(rows["commit_lsn"], 1005))
    write_deltalake(zone.changes.table.uri, added, mode="append")
    with pytest.raises(RawZoneError, match=r"4 rows .* contain 6, .* added rows") as refused:
        remove_windows(zone, 1, Lsn(1020), LATER)
    assert zone.changes.kept_from(1) is None
    assert starts(zone) == [1000, 1010, 1020, 1030]
    condition = re.search(r"with (epoch = 1 AND commit_lsn < 1020) from", str(refused.value))
    assert condition is not None
    by_hand = zone.changes.table.load()
    assert by_hand is not None
    by_hand.delete(condition[1])
    assert remove_windows(zone, 1, Lsn(1020), LATER).missing_count == 4
    assert len(landed(zone)) == 4


def test_streaming_readers_see_no_change_after_a_deletion_of_windows(
    zone: RawZone,
) -> None:
    land_days(zone, 4)
    maintain_raw_zone(zone, minimum_files=2)
    remove_windows(zone, 1, Lsn(1020), LATER)
    log = Path(zone.changes.table.uri, "_delta_log")
    actions = [json.loads(line) for line in max(log.glob("*.json")).read_text().splitlines()]
    files = [a.get("add") or a.get("remove") for a in actions if a.keys() & {"add", "remove"}]
    assert [file["dataChange"] for file in files] == [False, False]


def test_a_landing_that_began_before_a_removal_of_windows_is_committed(zone: RawZone) -> None:
    land_days(zone, 4)
    rows = transaction(1045, 2, commit_ts=COMMIT_TS + 4 * DAY)

    def retention() -> None:
        assert remove_windows(zone, 1, Lsn(1020), LATER).window_count == 2

    zone.changes.land(window(1040, 1050), [rows], retention)
    assert starts(zone) == [1020, 1030, 1040]


@pytest.mark.sampled
def test_concurrent_retention_compaction_and_landing_lose_and_duplicate_nothing(
    zone: RawZone,
) -> None:
    land_days(zone, 60)
    stop = threading.Event()
    errors: list[Exception] = []

    def retention() -> None:
        for day in range(1, 60):
            try:
                remove_windows(zone, 1, Lsn(1000 + 10 * day), LATER + 1000 * DAY)
            except TransientError:
                continue
            except Exception as error:
                errors.append(error)

    def compaction() -> None:
        while not stop.is_set():
            try:
                maintain_raw_zone(zone, minimum_files=4, minimum_log_entries=8)
            except TransientError:
                continue
            except Exception as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=retention), threading.Thread(target=compaction)]
    for thread in threads:
        thread.start()
    for day in range(60, 90):
        start = 1000 + 10 * day
        rows = transaction(start + 5, 2, commit_ts=COMMIT_TS + day * DAY)
        zone.changes.land(window(start, start + 10), [rows])
    threads[0].join()
    stop.set()
    threads[1].join()
    assert errors == []
    floor = zone.changes.kept_from(1)
    assert floor is not None
    expected = [1005 + 10 * day for day in range(90) if 1000 + 10 * day >= floor]
    assert landed(zone) == sorted((lsn, n) for lsn in expected for n in range(2))
    assert starts(zone) == [lsn - 5 for lsn in expected]


def land_copies(zone: RawZone, *lsns: int, table: str = "orders", epoch: int = 1) -> None:
    rows = pa.RecordBatch.from_pydict(
        {"new": [["1", "a"], ["2", "b"]]}, schema=pa.schema([("new", pa.list_(pa.string()))])
    )
    for lsn in lsns:
        zone.snapshots.land_snapshot(epoch, Lsn(lsn), relation(table), 1, [rows])


def copies(zone: RawZone, table: str = "orders") -> list[tuple[int, int, int]]:
    return [
        (copy.epoch, int(copy.snapshot_lsn), copy.row_count)
        for copy in zone.snapshots.complete_snapshots()
        if copy.table == table
    ]


def test_snapshots_are_removed_after_lost_changes_if_a_later_snapshot_is_merged(
    zone: RawZone,
) -> None:
    land_days(zone, 6)
    land_copies(zone, 1000, 1012, 1035)
    land_copies(zone, 1000, 1012, table="history")
    land_copies(zone, 1000, table="only")
    merged = {
        TableName("shop", "orders"): Position(1, Lsn(1020)),
        TableName("shop", "only"): Position(1, Lsn(1060)),
    }
    assert remove_snapshots(zone, merged) == 0
    remove_windows(zone, 1, Lsn(1060), COMMIT_TS + 2.5 * DAY)

    assert remove_snapshots(zone, merged) == 1
    # 1035 is not merged, so 1012 is the newest merged snapshot.
    assert copies(zone) == [(1, 1012, 2), (1, 1035, 2)]
    assert (
        remove_snapshots(zone, merged | {TableName("shop", "orders"): Position(1, Lsn(1035))}) == 1
    )
    assert copies(zone) == [(1, 1035, 2)]
    assert copies(zone, "history") == [(1, 1000, 2), (1, 1012, 2)]
    assert copies(zone, "only") == [(1, 1000, 2)]


def test_snapshots_of_an_earlier_epoch_are_removed_when_one_of_a_later_epoch_is_merged(
    zone: RawZone,
) -> None:
    land_days(zone, 2)
    land_days(zone, 2, epoch=2)
    land_copies(zone, 1000)
    land_copies(zone, 1000, epoch=2)
    remove_windows(zone, 1, None, LATER)
    assert remove_snapshots(zone, {TableName("shop", "orders"): Position(1, Lsn(1020))}) == 0
    assert remove_snapshots(zone, {TableName("shop", "orders"): Position(2, Lsn(1000))}) == 1
    assert copies(zone) == [(2, 1000, 2)]


def test_partial_snapshots_are_removed_with_the_changes_after_them(zone: RawZone) -> None:
    land_days(zone, 6)
    assert remove_partial_snapshots(zone) == 0
    rows = pa.RecordBatch.from_pydict(
        {"new": [["1", "a"]]}, pa.schema([("new", pa.list_(pa.string()))])
    )
    for lsn in (1012, 1030, 1035):
        zone.partial_snapshots.land_snapshot(1, Lsn(lsn), relation(), 1, [rows])
    assert remove_partial_snapshots(zone) == 0
    remove_windows(zone, 1, Lsn(1060), COMMIT_TS + 2.5 * DAY)
    assert remove_partial_snapshots(zone) == 1
    kept = zone.partial_snapshots.complete_snapshots()
    assert [snapshot.snapshot_lsn for snapshot in kept] == [1030, 1035]
    assert zone.snapshots.complete_snapshots() == []
