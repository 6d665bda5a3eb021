"""A process follows the logs of an S3 store commit by commit, and notices other commits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pyarrow.fs as pafs
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction

from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.raw.delta import commit_records, log_tail
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_cleanup import shorten_log
from pgcdc_assets.raw.delta.log_entries import commit_path
from pgcdc_assets.raw.delta.log_table import LogTable
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.raw.rows import land_empty, zone_with_window


@pytest.fixture
def zone(s3_lake: Lake) -> RawZone:
    """Return a raw zone with an epoch and a window."""
    return zone_with_window(s3_lake)


_LAND = """
import sys
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
window = LsnWindow.of(1, int(sys.argv[2]), int(sys.argv[3]))
RawZone(Lake(sys.argv[1]), "c").changes.land(window, [])
"""


def land_elsewhere(zone: RawZone, start: int, end: int) -> None:
    """Land an empty window by another process."""
    command = [sys.executable, "-c", _LAND, zone.lake.uri, str(start), str(end)]
    subprocess.run(command, check=True)


def files_of(zone: RawZone) -> pafs.FileSystem:
    return filesystem(zone.lake, zone.changes.table.uri)


def log_of(zone: RawZone) -> dict[str, bytes]:
    """Read the objects of a table's log."""
    files = files_of(zone)
    found = files.get_file_info(pafs.FileSelector("_delta_log", recursive=True))
    return {
        each.path: files.open_input_stream(each.path).read()
        for each in found
        if each.type == pafs.FileType.File
    }


def put_log(zone: RawZone, objects: dict[str, bytes]) -> None:
    """Replace the objects of a table's log, as a restore from a backup does."""
    files = files_of(zone)
    for path in log_of(zone):
        files.delete_file(path)
    for path, content in objects.items():
        with files.open_output_stream(path) as target:
            target.write(content)


def test_each_window_needs_the_same_requests(zone: RawZone, store_proxy: StoreProxy) -> None:
    """The log gets its first checkpoint after 50 commits."""
    counts = []
    for number in range(1, 40):
        store_proxy.forget()
        land_empty(zone, number)
        counts.append(store_proxy.counts())
    assert all(each == counts[0] for each in counts), counts
    assert counts[0].total() <= 15


@pytest.mark.sampled
def test_windows_are_landed_across_checkpoints(zone: RawZone) -> None:
    for number in range(1, 104):
        end = land_empty(zone, number)
    assert any("00000099.checkpoint" in path for path in log_of(zone))
    assert zone.changes.captured_through(1) == end
    fresh = DeltaTable(zone.changes.table.uri, storage_options=zone.lake.delta_options)
    assert fresh.transaction_version(zone.changes.app_id(1)) == end


def test_a_window_of_another_process_is_noticed(zone: RawZone) -> None:
    land_elsewhere(zone, 100, 200)
    assert zone.changes.land(LsnWindow.of(1, 100, 200), []).already_landed
    land_empty(zone, 2)
    land_elsewhere(zone, 300, 400)
    with pytest.raises(RawZoneError, match="overlaps"):
        zone.changes.land(LsnWindow.of(1, 300, 500), [])
    assert land_empty(zone, 4) == zone.changes.captured_through(1)


def test_a_window_of_another_process_during_the_landing_is_noticed(zone: RawZone) -> None:
    with pytest.raises(RawZoneError, match="overlaps"):
        zone.changes.land(LsnWindow.of(1, 100, 200), [], lambda: land_elsewhere(zone, 100, 150))
    assert zone.changes.captured_through(1) == 150
    zone.changes.land(LsnWindow.of(1, 150, 200), [])
    assert [each.window.end for each in zone.changes.windows(1)] == [100, 150, 200]


def test_a_landing_that_fails_is_repeated(zone: RawZone) -> None:
    def fail() -> None:
        raise RuntimeError("the lease is lost")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            zone.changes.land(LsnWindow.of(1, 100, 200), [], fail)
    assert land_empty(zone, 1) == 200
    assert land_empty(zone, 2) == zone.changes.captured_through(1)


def restore_and_grow(zone: RawZone, backup: dict[str, bytes], ends: list[int]) -> None:
    """Restore a backup, and land other windows by another process."""
    put_log(zone, backup)
    for start, end in zip([200, *ends], ends, strict=False):
        land_elsewhere(zone, start, end)


@pytest.mark.sampled
@pytest.mark.parametrize("ends", [[250, 260], [250, 260, 270]])
def test_the_log_of_a_backup_with_other_commits_is_noticed(zone: RawZone, ends: list[int]) -> None:
    """The restored log has the version that the process knows, or a later version."""
    land_empty(zone, 1)
    backup = log_of(zone)
    land_empty(zone, 2)
    land_empty(zone, 3)
    assert zone.changes.captured_through(1) == 400
    restore_and_grow(zone, backup, ends)
    assert zone.changes.captured_through(1) == ends[-1]
    window = LsnWindow.of(1, ends[-1], 500)
    assert not zone.changes.land(window, []).already_landed
    assert zone.changes.captured_through(1) == 500


def test_a_log_whose_known_entries_were_removed_is_read_again(zone: RawZone) -> None:
    for number in range(1, 4):
        land_empty(zone, number)
    table = zone.changes.table.load()
    assert table is not None
    shorten_log(zone.lake, zone.changes.table.uri, table)
    for version in range(table.version()):
        files_of(zone).delete_file(commit_path(version))
    assert zone.changes.captured_through(1) == 400
    assert land_empty(zone, 4) == zone.changes.captured_through(1)


def add_transaction(table: DeltaTable, name: str, version: int) -> None:
    """Commit an application transaction alone."""
    table.create_write_transaction(
        [],
        "append",
        table.schema(),
        commit_properties=CommitProperties(app_transactions=[Transaction(name, version)]),
    )


def test_transactions_of_all_kinds_equal_those_of_a_new_reader(zone: RawZone) -> None:
    """Known ones, new ones, ones that decrease, and applications without a transaction."""
    table = zone.changes.table
    names = ["a", "b", "c", zone.changes.app_id(1)]
    for number, (name, version) in enumerate([("a", 5), ("b", 7), ("a", 3), ("c", 1), ("b", 9)]):
        known = table.load()
        assert known is not None
        if number % 2:
            assert known.transaction_version("never") is None
        expected = {each: DeltaTable.transaction_version(known, each) for each in names}
        assert {each: known.transaction_version(each) for each in names} == expected
        add_transaction(known, name, version)
        known.update_incremental()
        assert known.transaction_version(name) == version
    read = table.load()
    assert read is not None
    assert [read.transaction_version(each) for each in "abc"] == [3, 9, 1]
    earlier = LogTable(zone.lake, table.uri)
    earlier.load_as_version(read.version() - 2)
    assert [earlier.transaction_version(each) for each in "abc"] == [3, 7, None]
    assert [read.transaction_version(each) for each in "abc"] == [3, 9, 1]


def test_a_store_without_tags_is_map_tables_time(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untagged(error: type[Exception]) -> Callable[[pafs.FileSystem, int], bytes]:
        def raise_it(files: pafs.FileSystem, version: int) -> bytes:
            raise error("ETag")

        return raise_it

    for number, error in enumerate((KeyError, TypeError, OSError), start=1):
        monkeypatch.setattr(log_tail, "_tag", untagged(error))
        assert land_empty(zone, number) == zone.changes.captured_through(1)


def test_a_lake_with_other_options_does_not_get_the_object(zone: RawZone) -> None:
    """An object keeps its time limits and credentials, such as those before a rotation."""
    land_empty(zone, 1)
    uri, name = zone.changes.table.uri, zone.changes.table.capture
    other = Lake(zone.lake.uri, {**zone.lake.storage_options, "timeout": "20s"})
    assert log_tail.take_table(other, uri, name) is None
    assert log_tail.take_table(zone.lake, uri, name) is not None


def test_a_log_from_before_the_newest_copy_of_its_windows_is_noticed(zone: RawZone) -> None:
    """The backup of `raw/changes` is older than that of `raw/windows`."""
    for number in range(1, 4):
        land_empty(zone, number)
    backup = log_of(zone)
    for number in range(4, 8):
        land_empty(zone, number)
    maintain_raw_zone(zone, minimum_log_entries=1)
    put_log(zone, backup)
    # As after the restart of the process.
    commit_records._KNOWN.clear()
    for start in range(400, 1000, 150):
        zone.changes.land(LsnWindow.of(1, start, start + 150), [])
    ends = [int(each.window.end) for each in RawZone(zone.lake, zone.name).changes.windows(1)]
    assert ends == [100, 200, 300, 400, 550, 700, 850, 1000]
