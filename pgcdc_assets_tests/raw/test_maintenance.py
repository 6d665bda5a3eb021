"""Maintenance bounds the number of files and log entries after thousands of small windows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pgcdc_assets.errors import PgcdcError, RawZoneError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw import changes, schema
from pgcdc_assets.raw.delta import compaction
from pgcdc_assets.raw.delta.files import push_to_disk
from pgcdc_assets.raw.delta.scan import DataFile, scan
from pgcdc_assets.raw.delta.table import DELETED_FILE_RETENTION, MARK, RawTable
from pgcdc_assets.raw.maintenance import RawMaintenanceReport, maintain_raw_zone
from pgcdc_assets.raw.table_list import ListedTable
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.full_disk import full_disk
from pgcdc_assets_tests.support.raw.rows import batch, change, landed, relation, transaction, window


def land_small_windows(zone: RawZone, count: int, first: int = 1000) -> None:
    for n in range(count):
        rows = [transaction(first + n, 2)] if n % 3 else []
        zone.changes.land(window(first + n, first + n + 1), rows)


def make_old(folder: Path, days: int = 2) -> None:
    then = time.time() - days * 86_400
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def test_maintenance_below_its_limits_writes_nothing(zone: RawZone) -> None:
    assert maintain_raw_zone(zone) == RawMaintenanceReport()
    land_small_windows(zone, 3)
    assert maintain_raw_zone(zone) == RawMaintenanceReport()


def test_maintenance_keeps_rows_windows_and_the_application_transaction(zone: RawZone) -> None:
    land_small_windows(zone, 30)
    windows, rows = zone.changes.windows(1), landed(zone)
    make_old(Path(zone.changes.table.uri))

    report = maintain_raw_zone(zone, minimum_files=10, minimum_log_entries=20)

    assert report.files_merged == 20
    log = Path(zone.changes.table.uri, "_delta_log")
    assert len(list(log.glob("*.json"))) <= 3
    assert zone.changes.windows(1) == windows
    assert len(windows) == 30
    assert landed(zone) == rows
    assert zone.changes.captured_through(1) == Lsn(1030)
    assert zone.changes.summary(window(1001, 1002)).row_count == 2
    assert zone.changes.summary(window(1003, 1004)).row_count == 0
    assert zone.changes.land(window(1001, 1002), []).already_landed


def test_the_log_is_on_the_disk_from_its_first_entry_to_its_checkpoint(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2: all files of a confirmed window survive a power failure."""
    pushed: list[Path] = []

    def push(path: Path) -> None:
        pushed.append(path)
        push_to_disk(path)

    for module in ("table", "log_cleanup"):
        monkeypatch.setattr(f"pgcdc_assets.raw.delta.{module}.push_to_disk", push)
    land_small_windows(zone, 3)
    table = Path(zone.changes.table.uri)
    log = table / "_delta_log"
    assert set(log.glob("*.json")) <= set(pushed)
    assert {table, table.parent} <= set(pushed)
    # delta-rs opens no table with a damaged checkpoint, also if all log entries are there.
    land_small_windows(zone, 49, first=1003)
    assert len(list(log.glob("*.checkpoint*"))) == 1
    assert {*log.glob("*.checkpoint*"), log / "_last_checkpoint"} <= set(pushed)
    maintain_raw_zone(zone, minimum_log_entries=1)
    assert {*log.glob("*.checkpoint*"), log / "_last_checkpoint"} <= set(pushed)


def test_windows_are_read_from_the_window_index_and_the_log_once_each(zone: RawZone) -> None:
    land_small_windows(zone, 5)
    maintain_raw_zone(zone, minimum_log_entries=1)
    zone.changes.land(window(1005, 1006), [transaction(1005, 1)])
    starts = [w.window.start for w in zone.changes.windows(1)]
    assert starts == [1000, 1001, 1002, 1003, 1004, 1005]
    assert [w.window.start for w in zone.changes.windows(1, Lsn(1004))] == [1004, 1005]
    maintain_raw_zone(zone, minimum_log_entries=1)
    assert [w.window.start for w in zone.changes.windows(1)] == starts


def test_the_window_index_keeps_and_reads_few_files(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc_assets.raw.windows.index._SMALL_FILES", 4)
    window_index = zone.changes.window_index.table
    for n in range(10):
        land_small_windows(zone, 1, first=1000 + n)
        maintain_raw_zone(zone, minimum_log_entries=1)
    loaded = window_index.load_or_create()
    assert len(loaded.file_uris()) == 2
    starts = [int(w.window.start) for w in zone.changes.windows(1)]
    assert starts == list(range(1000, 1010))

    read: list[DataFile] = []

    def observed(table: RawTable, files: Sequence[DataFile], *rest: Any) -> Iterator[Any]:
        read.extend(files)
        return scan(table, files, *rest)

    monkeypatch.setattr("pgcdc_assets.raw.windows.index.scan", observed)
    assert [int(w.window.start) for w in zone.changes.windows(1, Lsn(1009))] == [1009]
    assert len(read) == 1


def test_maintenance_removes_orphans_of_all_tables_and_nothing_else(zone: RawZone) -> None:
    """A killed snapshot leaves old files without a commit; a running snapshot has recent files."""
    land_small_windows(zone, 3)
    zone.relations.register(1, relation(), Lsn(1000))
    zone.relations.flush()
    zone.snapshots.land_snapshot(1, Lsn(1000), relation(), 1, [])
    maintain_raw_zone(zone, minimum_log_entries=1)
    zone.changes.land(window(1003, 1004), [])
    tables = (zone.changes, zone.snapshots, zone.relations, zone.changes.window_index)
    folders = [Path(part.table.uri) for part in tables]
    kept = [sorted(folder.glob("*.parquet")) for folder in folders]
    for folder in folders:
        Path(folder, "part-old.parquet").write_bytes(b"x")
        make_old(folder, days=8)
        Path(folder, "part-new.parquet").write_bytes(b"x")

    assert maintain_raw_zone(zone, minimum_log_entries=1).files_removed == 4

    for folder, before in zip(folders, kept, strict=True):
        names = {path.name for path in folder.glob("*.parquet")}
        assert names >= {path.name for path in before} | {"part-new.parquet"}
        assert "part-old.parquet" not in names
    assert len(zone.changes.windows(1)) == 4
    assert len(zone.relations.versions(1)) == len(zone.snapshots.complete_snapshots(1)) == 1


def test_maintenance_deletes_files_also_on_a_full_disk(zone: RawZone) -> None:
    """The deletions came after the first write, so a full disk stayed full."""
    land_small_windows(zone, 10)
    orphan = Path(zone.changes.table.uri, "part-orphan.parquet")
    orphan.write_bytes(b"x")
    make_old(Path(zone.changes.table.uri), days=8)
    with full_disk(), pytest.raises(TransientError, match="File too large"):
        maintain_raw_zone(zone, minimum_files=2, minimum_log_entries=1)
    assert not orphan.exists()
    assert len(landed(zone)) == 12


def test_maintenance_cleans_up_the_list_of_tables_before_the_first_window(zone: RawZone) -> None:
    store = zone.table_list
    for number in range(30):
        assert store.replace(store.read(), "", [ListedTable(TableName("s", "t"), number)])
    folder = Path(store.table.uri)
    Path(folder, "part-old.parquet").write_bytes(b"x")
    make_old(folder, days=8)
    assert maintain_raw_zone(zone) == RawMaintenanceReport()

    report = maintain_raw_zone(zone, minimum_log_entries=1)

    assert report == RawMaintenanceReport(files_removed=1)
    assert len(list(folder.glob("_delta_log/*.json"))) <= 3
    assert [table.relation_id for table in store.read().tables] == [29]


def test_compaction_does_not_mix_epochs(zone: RawZone) -> None:
    for epoch in (1, 2):
        for n in range(4):
            zone.changes.land(window(100 + n, 101 + n, epoch), [batch(change(100 + n))])
    reports = zone.changes.compact(2)
    assert [(r.files_before, r.files_after, r.row_count) for r in reports] == [(4, 1, 4)] * 2
    assert landed(zone, 1) == landed(zone, 2) == [(100 + n, 0) for n in range(4)]


@pytest.mark.parametrize("damage", ["truncated", "missing", "store"])
def test_files_that_cannot_be_compacted_stop_no_other_work(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """A capture's run continues after an error of the package only."""
    land_small_windows(zone, 6)
    file = next(Path(zone.changes.table.uri).glob("*.parquet"))
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "missing":
        file.unlink()
    else:

        def fail(*_: object) -> NoReturn:
            raise OSError("AWS Error SLOW_DOWN during GetObject")

        monkeypatch.setattr(compaction, "scan", fail)
    with pytest.raises(PgcdcError):
        maintain_raw_zone(zone, minimum_files=2, minimum_log_entries=1)
    assert zone.changes.window_index.unsaved_entries(DeltaTable(zone.changes.table.uri)) == 0


def test_compaction_stops_at_a_missing_file(zone: RawZone) -> None:
    land_small_windows(zone, 6)
    next(Path(zone.changes.table.uri).glob("*.parquet")).unlink()
    version = DeltaTable(zone.changes.table.uri).version()
    with pytest.raises(RawZoneError, match="a file of its log is missing"):
        maintain_raw_zone(zone, minimum_files=2)
    assert DeltaTable(zone.changes.table.uri).version() == version


def test_files_that_cannot_be_compacted_are_left_alone_for_some_minutes(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each window would read up to 128 MB, and new files would never be compacted."""
    land_small_windows(zone, 6)
    next(Path(zone.changes.table.uri).glob("*.parquet")).unlink()
    with pytest.raises(RawZoneError, match="a file of its log is missing"):
        maintain_raw_zone(zone, minimum_files=2)
    assert maintain_raw_zone(zone, minimum_files=2) == RawMaintenanceReport()
    land_small_windows(zone, 6, first=1006)
    assert maintain_raw_zone(zone, minimum_files=2).files_merged == 4
    monkeypatch.setattr(compaction, "_PAUSE_SECONDS", 0.0)
    with pytest.raises(RawZoneError, match="a file of its log is missing"):
        maintain_raw_zone(zone, minimum_files=2)


@pytest.mark.parametrize(("days", "is_marked"), [(2, False), (8, True)])
def test_maintenance_keeps_the_files_of_a_slow_landing(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch, days: int, is_marked: bool
) -> None:
    """Maintenance keeps files younger than seven days, and files of a writer with a recent mark."""
    land_small_windows(zone, 3)
    folder = Path(zone.changes.table.uri)
    if is_marked:
        monkeypatch.setattr("pgcdc_assets.raw.delta.files._MARK_SECONDS", 0.0)

    def wait_long() -> None:
        make_old(folder, days)
        for mark in folder.glob("_writers/*"):
            os.utime(mark)
        maintain_raw_zone(RawZone(zone.lake, zone.name), minimum_log_entries=1)

    rows = [transaction(1003, 3)]
    report = zone.changes.land(window(1003, 1004), rows, before_commit=wait_long)
    assert report.summary.row_count == 3
    assert zone.changes.summary(window(1003, 1004)).row_count == 3


def test_files_of_a_writer_with_an_old_mark_are_deleted_with_the_mark(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc_assets.raw.delta.files._MARK_SECONDS", 0.0)
    land_small_windows(zone, 3)
    folder = Path(zone.changes.table.uri)
    before = set(folder.glob("*.parquet"))
    writer = zone.changes.table.writer()
    row = change(1003, epoch=1, window=window(1003, 1004).key)
    writer.write(pa.Table.from_pylist([row], schema=schema.CHANGES))
    writer.finish()
    make_old(folder, days=8)
    maintain_raw_zone(zone, minimum_log_entries=1)
    assert set(folder.glob("*.parquet")) == before
    assert list(folder.glob("_writers/*")) == []


def test_a_landing_whose_file_was_deleted_commits_nothing_and_is_repeated(zone: RawZone) -> None:
    """Another program runs VACUUM without a retention."""
    table = zone.changes.table
    land_small_windows(zone, 2)

    def vacuum() -> None:
        DeltaTable(table.uri).vacuum(
            retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True
        )

    version = DeltaTable(table.uri).version()
    with pytest.raises(TransientError, match=r"1 of 1 files .* deleted before their commit"):
        zone.changes.land(window(1002, 1003), [transaction(1002, 3)], before_commit=vacuum)
    assert zone.changes.captured_through(1) == Lsn(1002)
    assert zone.changes.land(window(1002, 1003), [transaction(1002, 3)]).summary.row_count == 3
    assert DeltaTable(table.uri).version() > version


def test_replaced_files_are_kept_for_earlier_readers(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the replacement counts, not the age of the file."""
    land_small_windows(zone, 6)
    folder = Path(zone.changes.table.uri)
    make_old(folder, days=30)
    rows, before = landed(zone), set(folder.glob("*.parquet"))
    report = maintain_raw_zone(zone, minimum_files=2, minimum_log_entries=1)
    assert (report.files_merged, report.files_removed) == (len(before), 0)
    assert set(folder.glob("*.parquet")) > before
    monkeypatch.setattr("pgcdc_assets.raw.delta.vacuum.REPLACED_HOURS", 0)
    zone.changes.land(window(1006, 1007), [])
    assert maintain_raw_zone(zone, minimum_log_entries=1).files_removed == len(before)
    assert landed(zone) == rows


def test_tables_of_an_earlier_release_get_the_retention_of_new_tables(zone: RawZone) -> None:
    """VACUUM of Spark uses the table's property."""
    land_small_windows(zone, 3)
    tables = (
        (zone.changes.table, "interval 26 hours"),
        (zone.schema_events.table, "interval 7 days"),
    )
    for table, _ in tables:
        old = table.load_or_create()
        old.alter.set_table_properties({DELETED_FILE_RETENTION: "interval 1 day"})
    maintain_raw_zone(zone, minimum_log_entries=1)
    for table, wanted in tables:
        configuration = table.load_or_create().metadata().configuration
        assert configuration[DELETED_FILE_RETENTION] == wanted
        assert configuration[MARK] == "test"
    assert len(zone.changes.windows(1)) == 3
    zone.changes.land(window(1003, 1004), [transaction(1003, 2)])


def test_a_checkpoint_forgets_removals_after_the_retention(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each opening of the table would read the replaced files of a week."""
    monkeypatch.setattr(changes, "FILE_RETENTION", "interval 5 seconds")
    land_small_windows(zone, 6)
    rows = landed(zone)
    log = Path(zone.changes.table.uri, "_delta_log")
    for start, pause, compacted, removals in ((1006, 0.0, 4, 4), (1007, 5.5, 0, 0)):
        time.sleep(pause)
        zone.changes.land(window(start, start + 1), [])
        report = maintain_raw_zone(zone, minimum_files=2, minimum_log_entries=0)
        assert report.files_merged == compacted
        newest = max(log.glob("*.checkpoint.parquet"))
        removed = pq.read_table(newest, columns=["remove"]).column("remove")
        assert len(removed) - removed.null_count == removals
    assert landed(zone) == rows
