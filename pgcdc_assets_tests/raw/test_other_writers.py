"""Other programs that write to tables of the raw zone, or remove entries of their logs."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta import scan as module
from pgcdc_assets.raw.delta.log_entries import LAST_CHECKPOINT, commit_path
from pgcdc_assets.raw.delta.scan import DataFile, data_files, scan
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.retention import remove_windows
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.raw.test_retention import LATER, land_days
from pgcdc_assets_tests.raw.test_stores import texts
from pgcdc_assets_tests.support.raw.epochs import EPOCH
from pgcdc_assets_tests.support.raw.rows import landed, relation, transaction, window

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def compact_by_another(zone: RawZone) -> None:
    """Compact `raw/changes` as OPTIMIZE of another program does: all epochs in one file."""
    table = DeltaTable(zone.changes.table.uri)
    table.optimize.compact()
    assert len(table.file_uris()) == 1


def without_statistics(uri: str) -> None:
    """Remove the statistics of all files, as of a program that writes none."""
    for version in range(DeltaTable(uri).version() + 1):
        entry = Path(uri, commit_path(version))
        actions = [json.loads(line) for line in entry.read_text().splitlines()]
        for action in actions:
            action.get("add", {}).pop("stats", None)
        entry.write_text("".join(json.dumps(action) + "\n" for action in actions))


def test_files_without_statistics_are_compacted_and_removed(zone: RawZone) -> None:
    for epoch in (1, 2):
        land_days(zone, 3, epoch)
    zone.snapshots.land_snapshot(1, Lsn(50), relation(), 1, [texts(["1"]), texts(["2"])])
    for table in (zone.changes.table, zone.snapshots.table):
        without_statistics(table.uri)
    restored = RawZone(zone.lake, zone.name)
    (snapshot,) = restored.snapshots.complete_snapshots()
    assert (snapshot.row_count, snapshot.relation_id) == (2, 16400)
    assert remove_windows(restored, 2, Lsn(1010), LATER).row_count == 2
    report = maintain_raw_zone(restored, minimum_files=1, minimum_log_entries=1)
    assert report.files_merged == 5
    without_statistics(zone.changes.window_index.table.uri)
    restored = RawZone(zone.lake, zone.name)
    assert [int(each.window.start) for each in restored.changes.windows(2)] == [1010, 1020]
    assert remove_windows(restored, 1, Lsn(1020), LATER).row_count == 4
    assert [lsn for lsn, _ in landed(restored, 1)] == [1025, 1025]
    assert [lsn for lsn, _ in landed(restored, 2)] == [1015, 1015, 1025, 1025]


def test_a_snapshot_without_statistics_is_read_once(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each merge lists all snapshots."""
    for lsn in (50, 60):
        zone.snapshots.land_snapshot(1, Lsn(lsn), relation(), 1, [texts(["1"]), texts(["2"])])
    without_statistics(zone.snapshots.table.uri)
    restored = RawZone(zone.lake, zone.name)
    read: list[str] = []
    real = module.scan

    def counted(table: RawTable, files: Sequence[DataFile], *args: Any) -> Iterator[Any]:
        read.extend(file.path for file in files)
        return real(table, files, *args)

    monkeypatch.setattr(module, "scan", counted)
    before = restored.snapshots.complete_snapshots()
    assert [each.row_count for each in before] == [2, 2]
    assert len(read) == 2
    zone.snapshots.land_snapshot(1, Lsn(70), relation(), 1, [texts(["1"])])
    assert restored.snapshots.complete_snapshots()[:2] == before
    assert len(read) == 2


def test_windows_are_removed_from_files_with_several_epochs(zone: RawZone) -> None:
    for epoch in (1, 2, 3):
        land_days(zone, 3, epoch)
    compact_by_another(zone)
    assert remove_windows(zone, 2, Lsn(1010), LATER).row_count == 2
    assert remove_windows(zone, 1, None, LATER).row_count == 6
    assert [lsn for lsn, _ in landed(zone, 2)] == [1015, 1015, 1025, 1025]
    assert (len(landed(zone, 1)), len(landed(zone, 3))) == (0, 6)
    maintain_raw_zone(zone, minimum_files=1, minimum_log_entries=1)
    assert remove_windows(zone, 2, None, LATER).row_count == 4
    assert remove_windows(zone, 3, Lsn(1030), LATER).row_count == 6
    assert [landed(zone, epoch) for epoch in (1, 2, 3)] == [[], [], []]


def test_files_that_another_program_has_compacted_meanwhile_are_not_added_again(
    zone: RawZone,
) -> None:
    land_days(zone, 6)
    before, loaded = landed(zone), zone.changes.table.load()
    compact_by_another(zone)
    zone.changes.compact(2, loaded)
    assert landed(zone) == before


def test_a_snapshot_that_another_program_has_compacted_is_read(zone: RawZone) -> None:
    """The program's files are in folders of the partition, whose names are encoded."""
    zone.snapshots.table.load_or_create()
    landing = zone.snapshots.begin_snapshot(1, Lsn(50), relation("with space/ö=%"), 1)
    for row in ("1", "2"):
        landing.write([texts([row])])
    landing.commit()
    table = DeltaTable(zone.snapshots.table.uri)
    assert table.optimize.compact()["numFilesRemoved"] == 2
    loaded = zone.snapshots.table.load()
    assert loaded is not None
    parts = scan(zone.snapshots.table, data_files(loaded), ["new"])
    rows = [row for part in parts for row in part["new"].to_pylist()]
    assert sorted(rows) == [["1"], ["2"]]
    (snapshot,) = zone.snapshots.complete_snapshots()
    assert (snapshot.table, snapshot.row_count) == ("with space/ö=%", 2)
    assert zone.snapshots.size_bytes(snapshot) > 0


@pytest.mark.parametrize("removed", [3, 4])
def test_the_times_in_removed_log_entries_are_unknown(zone: RawZone, removed: int) -> None:
    at = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    store = zone.snapshots
    for lsn in (50, 60, 70):
        store.land_snapshot(1, Lsn(lsn), relation(), 1, [texts(["1"])], taken_at=at)
    DeltaTable(store.table.uri).create_checkpoint()
    for version in range(removed):
        Path(store.table.uri, commit_path(version)).unlink()
    known = RawZone(zone.lake, zone.name).snapshots
    assert len(known.complete_snapshots()) == 3
    assert [identity[1] for identity in known.times()] == ([70] if removed == 3 else [])


def _register(zone: RawZone) -> None:
    zone.relations.register(1, relation(), Lsn(10))
    zone.relations.flush()
    assert [each.relation for each in zone.relations.versions(1)] == [relation()]


def _begin_epoch(zone: RawZone) -> None:
    zone.epochs.append(EPOCH)
    assert zone.epochs.latest() == EPOCH


def _save_windows(zone: RawZone) -> None:
    land_days(zone, 2)
    before = zone.changes.windows(1)
    maintain_raw_zone(zone, minimum_log_entries=1)
    assert zone.changes.windows(1) == before


@pytest.mark.parametrize("write", [_register, _begin_epoch, _save_windows])
def test_a_commit_whose_answer_nfs_has_lost_keeps_its_files(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch, write: Callable[[RawZone], None]
) -> None:
    """NFS repeats a hard link whose answer is lost, and then says that the commit exists."""
    real = DeltaTable.create_write_transaction

    def commit_twice(self: DeltaTable, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        raise CommitFailedError("the version exists")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", commit_twice)
    write(zone)


@pytest.mark.spark
@pytest.mark.sampled
def test_a_feature_that_captures_cannot_write_is_named_with_its_remedy(
    zone: RawZone, spark: SparkSession
) -> None:
    land_days(zone, 2)
    uri = zone.changes.table.uri
    changed = DeltaTable(uri).version() + 1
    spark.sql(f"ALTER TABLE delta.`{uri}` CLUSTER BY (commit_lsn)")
    with pytest.raises(ConfigurationError, match=r"feature of the Delta table .*raw/changes"):
        zone.changes.land(window(1020, 1030), [transaction(1025, 2)])
    assert zone.changes.captured_through(1) == Lsn(1020)
    for file in Path(uri, "_delta_log").glob(f"{changed:020d}.*"):
        file.unlink()
    zone.changes.land(window(1020, 1030), [transaction(1025, 2)])
    assert len(landed(zone)) == 6
    assert pa.table(DeltaTable(zone.changes.table.uri).get_add_actions()).num_rows == 3


@pytest.mark.parametrize("version", [50, 3])
def test_a_hint_at_a_missing_checkpoint_is_removed(zone: RawZone, version: int) -> None:
    """A backup whose files were copied one after another has a later `_last_checkpoint`."""
    land_days(zone, 2)
    hint = Path(zone.changes.table.uri, LAST_CHECKPOINT)
    hint.write_text(f'{{"version":{version},"size":7}}')
    restored = RawZone(zone.lake, zone.name)
    land_days(restored, 1, day=2)
    assert len(landed(restored)) == 6
    assert not hint.exists()


@pytest.mark.spark
@pytest.mark.sampled
def test_rows_that_deletion_vectors_hide_do_not_come_back(
    zone: RawZone, spark: SparkSession
) -> None:
    """A person deletes personal data. A capture continues, and reads of the rows stop."""
    land_days(zone, 3)
    uri = zone.changes.table.uri
    spark.sql(
        f"ALTER TABLE delta.`{uri}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    )
    assert len(landed(zone)) == 6
    spark.sql(f"DELETE FROM delta.`{uri}` WHERE commit_lsn = 1015 AND ordinal = 1")
    assert [*Path(uri).glob("**/*.bin")]
    zone.changes.land(window(1030, 1040), [transaction(1035, 2)])
    with pytest.raises(ConfigurationError, match="by deletion vectors"):
        landed(zone)
    with pytest.raises(ConfigurationError, match="by deletion vectors"):
        maintain_raw_zone(zone, minimum_files=1)
    with pytest.raises(ConfigurationError, match="by deletion vectors") as refused:
        remove_windows(zone, 1, Lsn(1020), LATER)
    for statement in str(refused.value).partition("in Spark: ")[2].split("; "):
        spark.sql(statement)
    expected = [(1005, 0), (1005, 1), (1015, 0), (1025, 0), (1025, 1), (1035, 0), (1035, 1)]
    assert landed(zone) == expected
    assert maintain_raw_zone(zone, minimum_files=1).files_merged
    assert landed(zone) == expected
    assert remove_windows(zone, 1, Lsn(1020), LATER).missing_count == 1
