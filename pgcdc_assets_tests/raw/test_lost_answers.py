"""The daily job on the raw zone in an S3 store whose answers are lost: no row and no file is lost.

The store applies a write. The client gets an error, and may repeat the write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.delta import vacuum
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import read_commit
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.retention import remove_snapshots, remove_windows
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.object_store_proxy import Fault
from pgcdc_assets_tests.support.raw.epochs import EPOCH
from pgcdc_assets_tests.support.raw.rows import (
    COMMIT_TS,
    landed,
    relation,
    transaction,
    window,
)

_ORDERS = TableName("shop", "orders")
_LOST = ("SlowDown after", "cut after")

pytestmark = pytest.mark.sampled


@pytest.fixture
def zone(s3_lake: Lake, monkeypatch: pytest.MonkeyPatch) -> RawZone:
    """A zone with ten windows of two rows each, and two snapshots. Files are old at once."""
    monkeypatch.setattr(vacuum, "REPLACED_HOURS", 0)
    monkeypatch.setattr(vacuum, "ORPHAN_HOURS", 0)
    zone = RawZone(Lake(s3_lake.uri, {"timeout": "5s", "retry_timeout": "10s"}), "test")
    zone.epochs.append(EPOCH)
    for start in range(1000, 1100, 10):
        zone.changes.land(window(start, start + 10), [transaction(start + 5, 2)])
    rows = pa.RecordBatch.from_pydict(
        {"new": [["1", "a"]]}, pa.schema([("new", pa.list_(pa.string()))])
    )
    for lsn in (1000, 1060):
        zone.snapshots.land_snapshot(1, Lsn(lsn), relation(), 1, [rows])
    return zone


def maintain(zone: RawZone) -> None:
    maintain_raw_zone(zone, minimum_files=4, minimum_log_entries=1)


def remove(zone: RawZone) -> None:
    """Remove the windows before 1060, the last of which ends within a file, and a snapshot."""
    remove_windows(zone, 1, Lsn(1060), COMMIT_TS.replace(year=2030))
    remove_snapshots(zone, {_ORDERS: Position(1, Lsn(1100))})


def run_again_after_an_error(act: Callable[[RawZone], None], zone: RawZone) -> None:
    for _ in range(2):
        try:
            act(zone)
            return
        except TransientError:
            pass
    act(zone)


def check_log(table: RawTable) -> None:
    """Check that no commit adds and removes a file, and that each file of the table is there."""
    loaded = table.load()
    assert loaded is not None
    files = filesystem(table.lake, table.uri)
    for version in range(loaded.version() + 1):
        try:
            actions = read_commit(files, version)
        except FileNotFoundError:
            continue
        added, removed = (
            {action[kind]["path"] for action in actions if kind in action}
            for kind in ("add", "remove")
        )
        assert added.isdisjoint(removed), version
    paths = pa.table(loaded.get_add_actions()).column("path").to_pylist()
    assert paths and all(info.is_file for info in files.get_file_info(paths))


@pytest.mark.parametrize("what", _LOST)
@pytest.mark.parametrize("table", ["changes", "windows", "snapshots"])
def test_no_commit_of_the_maintenance_is_lost_or_repeated(
    table: str, what: str, zone: RawZone, store_proxy: StoreProxy
) -> None:
    """Compaction, the index of windows, and the removal of windows and snapshots."""
    rows, windows = landed(zone), zone.changes.windows(1)
    entry = f"raw/{table}/_delta_log/0"
    # The maintenance creates the index of windows first.
    times = 2 if table == "windows" else 1

    def fault() -> Fault:
        return Fault(what, "PUT", entry, is_conditional=True, times=times)

    if table != "snapshots":
        with store_proxy.making(fault()):
            run_again_after_an_error(maintain, zone)
        assert store_proxy.faults() == {what: times}
        assert landed(zone) == rows
        assert zone.changes.windows(1) == windows
        store_proxy.forget()
    if table != "windows":
        with store_proxy.making(fault()):
            run_again_after_an_error(remove, zone)
        assert store_proxy.faults() == {what: 1}
    else:
        remove(zone)
    assert zone.changes.kept_from(1) == Lsn(1060)
    assert landed(zone) == [row for row in rows if row[0] >= 1060]
    assert [copy.snapshot_lsn for copy in zone.snapshots.complete_snapshots()] == [1060]
    maintain(zone)
    assert landed(zone) == [row for row in rows if row[0] >= 1060]
    assert [summary.window.start for summary in zone.changes.windows(1)] == [1060, 1070, 1080, 1090]
    for each in (zone.changes.table, zone.changes.window_index.table, zone.snapshots.table):
        check_log(each)


@pytest.mark.parametrize("what", _LOST)
@pytest.mark.parametrize("part", [".checkpoint.parquet", "_last_checkpoint"])
def test_a_checkpoint_whose_answer_is_lost_loses_no_log_entry(
    part: str, what: str, zone: RawZone, store_proxy: StoreProxy
) -> None:
    rows, windows = landed(zone), zone.changes.windows(1)
    for turn in range(2):
        store_proxy.forget()
        with store_proxy.making(Fault(what, "PUT", part, times=1)):
            run_again_after_an_error(maintain, zone)
        assert store_proxy.faults() == {what: 1}, turn
        fresh = RawZone(zone.lake, zone.name)
        assert landed(fresh) == rows
        assert fresh.changes.windows(1) == windows
        check_log(fresh.changes.table)
        start = 1100 + 10 * turn
        zone.changes.land(window(start, start + 10), [transaction(start + 5, 2)])
        rows, windows = landed(zone), zone.changes.windows(1)


@pytest.mark.parametrize("what", _LOST)
def test_a_deletion_whose_answer_is_lost_is_repeated(
    what: str, zone: RawZone, store_proxy: StoreProxy
) -> None:
    rows = landed(zone)
    # delta-rs deletes by DELETE or by POST of a list.
    faults = [Fault(what, kind, "", times=1) for kind in ("DELETE", "POST")]
    with store_proxy.making(*faults):
        run_again_after_an_error(maintain, zone)
    assert store_proxy.faults()[what] >= 1
    assert landed(zone) == rows
    check_log(zone.changes.table)
    maintain(zone)
    assert landed(zone) == rows


def test_the_property_of_retention_is_set_once(zone: RawZone, store_proxy: StoreProxy) -> None:
    table: Any = zone.changes.table
    loaded: DeltaTable = table.load()
    loaded.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 9 days"})
    rows = landed(zone)
    for what in _LOST:
        with store_proxy.making(
            Fault(what, "PUT", "raw/changes/_delta_log/0", is_conditional=True, times=1)
        ):
            run_again_after_an_error(maintain, zone)
    assert landed(zone) == rows
    found = table.load().metadata().configuration
    assert found["delta.deletedFileRetentionDuration"] == table.file_retention
