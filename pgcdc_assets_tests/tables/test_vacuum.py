"""The files that are deleted after merges, and the files that are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.delta.log_entries import read_commit
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables import vacuum
from pgcdc_assets.tables.maintenance import maintain_table
from pgcdc_assets.tables.properties import FILE_RETENTION, LOG_RETENTION
from pgcdc_assets.tables.vacuum import (
    VacuumReport,
    delete_replaced_files,
    owner_hours,
    vacuum_after_merge,
)
from pgcdc_assets_tests.support.full_disk import full_disk
from pgcdc_assets_tests.support.rewritten_table import data_files, make_table, write


@pytest.fixture
def path(lake: Lake) -> Path:
    """Return a table at version 10, with ten replaced files as large as its only file."""
    return make_table(lake)


def live_files(path: Path) -> set[str]:
    return {Path(uri).name for uri in DeltaTable(str(path)).file_uris()}


def ids(path: Path) -> list[int]:
    return sorted(DeltaTable(str(path)).to_pyarrow_table()["id"].to_pylist())


def ledger(path: Path) -> Path:
    return path / "_pgcdc" / "replaced_files.json"


def edit_ledger(path: Path, **more: Any) -> None:
    ledger(path).write_text(json.dumps({**json.loads(ledger(path).read_text()), **more}))


def delete(lake: Lake, path: Path, keep_hours: float = 0.0) -> int:
    return delete_replaced_files(lake, str(path), keep_hours).deleted_files


def test_replaced_files_are_deleted_and_the_table_is_unchanged(lake: Lake, path: Path) -> None:
    report = delete_replaced_files(lake, str(path), 0)
    assert (report.deleted_files, data_files(path)) == (10, live_files(path))
    assert report.deleted_bytes == report.replaced_bytes > report.live_bytes
    assert ids(path) == list(range(10, 1010))
    assert delete_replaced_files(lake, str(path), 0) == VacuumReport(report.live_bytes)


def test_recently_replaced_files_are_kept_in_the_ledger(
    lake: Lake, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commit is read once, and may be removed before its files are old."""
    assert delete(lake, path, 1) == 0
    assert len(data_files(path)) == 11
    DeltaTable(str(path)).create_checkpoint()
    for entry in (path / "_delta_log").glob("*.json"):
        entry.unlink()
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    assert delete(lake, path, 1) == 10
    assert data_files(path) == live_files(path)


def test_a_restored_file_is_not_deleted(lake: Lake, path: Path) -> None:
    assert delete(lake, path, 1) == 0
    DeltaTable(str(path)).restore(3)
    assert delete(lake, path) == 10
    assert ids(path) == list(range(3, 1003))
    write(path, 50)
    assert delete(lake, path) == 1
    assert ids(path) == list(range(50, 1050))


def test_files_are_deleted_also_if_the_ledger_does_not_fit_on_the_disk(
    lake: Lake, path: Path
) -> None:
    """A full disk stayed full: the first call failed at the ledger, and so did the maintenance."""
    with full_disk():
        assert delete(lake, path, 1) == 0
        assert delete(lake, path) == 10
    assert data_files(path) == live_files(path)


@pytest.mark.sampled
@pytest.mark.spark
def test_a_new_deletion_vector_removes_no_file(lake: Lake, path: Path, spark: SparkSession) -> None:
    """A new deletion vector removes and adds the same file name."""
    assert delete(lake, path) == 10
    spark.sql(
        f"ALTER TABLE {delta_table(str(path))} SET TBLPROPERTIES "
        "('delta.enableDeletionVectors' = 'true')"
    )
    for number in (10, 11):
        spark.sql(f"DELETE FROM {delta_table(str(path))} WHERE id = {number}")
    store = pafs.SubTreeFileSystem(str(path), pafs.LocalFileSystem())
    removed = [
        action["remove"]["path"]
        for version in (12, 13)
        for action in read_commit(store, version)
        if "remove" in action
    ]
    assert set(removed) == live_files(path)
    assert delete(lake, path) == 0
    rows = spark.read.format("delta").load(str(path)).count()
    assert rows == 998


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_text(file.read_text()[:40]),
        lambda file: file.write_text('{"format": 2, "through": 10, "files": []}'),
        lambda file: file.write_text('{"format": 1, "through": 10, "files": [["a", "b", []]]}'),
        lambda file: file.write_text("[]"),
    ],
    ids=["lost", "cut off", "another format", "odd entries", "another shape"],
)
def test_an_unreadable_ledger_is_rebuilt_from_the_log(lake: Lake, path: Path, damage: Any) -> None:
    assert delete(lake, path, 1) == 0
    damage(ledger(path))
    assert delete(lake, path) == 10
    assert data_files(path) == live_files(path)


def test_the_ledger_of_a_previous_table_is_ignored(lake: Lake, path: Path) -> None:
    assert delete(lake, path, 1) == 0
    edit_ledger(path, through=1000)
    assert delete(lake, path) == 10


def test_an_outdated_ledger_is_harmless(lake: Lake, path: Path) -> None:
    """Two processes overwrite each other's ledger."""
    assert delete(lake, path, 1) == 0
    earlier = ledger(path).read_text()
    assert delete(lake, path) == 10
    ledger(path).write_text(earlier)
    delete(lake, path)
    assert ids(path) == list(range(10, 1010))
    assert json.loads(ledger(path).read_text())["files"] == []


def test_current_files_in_a_ledger_are_not_deleted(lake: Lake, path: Path) -> None:
    assert delete(lake, path, 1) == 0
    (current,) = live_files(path)
    outside = path.parent / "outside.parquet"
    outside.touch()
    names = [current, "../outside.parquet", str(outside), f"file://{outside}", "a/../../outside"]
    edit_ledger(path, files=[[name, 10**9, 0.0] for name in names])
    delete(lake, path)
    assert outside.exists()
    assert ids(path) == list(range(10, 1010))


def test_files_outside_the_table_are_not_deleted(lake: Lake, path: Path) -> None:
    """A shallow clone removes files of its source table."""
    outside = path.parent / "outside.parquet"
    outside.touch()
    newest = path / "_delta_log" / f"{10:020d}.json"
    names = [str(outside), f"file://{outside}", "../outside.parquet", "b%2E.parquet"]
    actions = [
        {"remove": {"path": name, "deletionTimestamp": 1, "dataChange": True}} for name in names
    ]
    (path / "b%2E.parquet").touch()
    (path / "b..parquet").touch()
    newest.write_text("\n".join([newest.read_text().strip(), *map(json.dumps, actions)]))
    assert delete(lake, path) == 10
    assert outside.exists()
    assert data_files(path) == live_files(path) | {"b%2E.parquet", "b..parquet"}


@pytest.mark.sampled
def test_two_concurrent_calls_delete_each_file_once_without_an_error(
    lake: Lake, path: Path
) -> None:
    for number in range(100):
        write(path, number)
    errors: list[Exception] = []
    barrier = threading.Barrier(4)

    def run() -> None:
        barrier.wait()
        try:
            for _ in range(3):
                delete(lake, path)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert data_files(path) == live_files(path)
    assert ids(path) == list(range(99, 1099))


def test_the_next_call_after_a_kill_deletes_the_other_files(lake: Lake, path: Path) -> None:
    script = (
        "import sys\nfrom pgcdc_assets.raw.lake import Lake\n"
        "from pgcdc_assets.tables.vacuum import delete_replaced_files\n"
        "delete_replaced_files(Lake(sys.argv[1]), sys.argv[2], 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, lake.uri, str(path)],
        env={**os.environ, "PGCDC_FAILPOINT": "after_file_deleted:4"},
        check=False,
    )
    assert done.returncode == -9
    assert len(data_files(path)) == 7
    assert ids(path) == list(range(10, 1010))
    assert delete(lake, path) == 10
    assert data_files(path) == live_files(path)


def test_the_deletion_of_a_file_is_retried(lake: Lake, path: Path) -> None:
    old = sorted(data_files(path) - live_files(path))[0]
    (path / old).unlink()
    (path / old).mkdir()
    with pytest.raises(
        TransientError, match=r"No row is lost; a later merge tries again"
    ) as caught:
        delete(lake, path)
    assert str(path) in str(caught.value)
    (path / old).rmdir()
    assert delete(lake, path) == 10
    assert data_files(path) == live_files(path)


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("interval 1 week", 168),
        ("INTERVAL 30 Days", 720),
        ("interval 1 day 12 hours", 36),
        ("interval 90 minutes", 1.5),
        ("interval 2 months", 168),
        ("P1D", 168),
        ("", 168),
    ],
)
def test_the_retention_of_the_owner_is_read(text: str, hours: float) -> None:
    assert owner_hours({FILE_RETENTION: text}) == hours


def test_the_retention_of_the_owner_is_applied(lake: Lake, path: Path) -> None:
    DeltaTable(str(path)).alter.set_table_properties({FILE_RETENTION: "interval 2 hours"})
    assert delete(lake, path) == 0
    assert len(data_files(path)) == 11
    assert owner_hours({}) == 0


def test_only_vacuum_deletes_files_of_a_large_table(
    lake: Lake, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vacuum, "SMALL_TABLE_BYTES", 1)
    assert delete(lake, path) == 0
    assert not ledger(path).exists()


def test_a_missing_table_is_not_an_error(lake: Lake) -> None:
    assert delete_replaced_files(lake, lake.path("nothing"), 0) == VacuumReport()
    assert vacuum_after_merge(lake, lake.path("nothing"), 0, 0) == VacuumReport()


def test_files_of_an_object_store_are_deleted(
    lake: Lake, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletion by delta-rs, as on S3, without folders."""
    store = pafs.PyFileSystem(DeltaStorageHandler(str(path)))
    monkeypatch.setattr(vacuum, "filesystem", lambda *_: store)
    assert delete(lake, path, 1) == 0
    gone = sorted(data_files(path) - live_files(path))[0]
    (path / gone).unlink()
    assert delete(lake, path) == 10
    assert data_files(path) == live_files(path)
    assert json.loads(ledger(path).read_text())["files"] == []


@pytest.mark.sampled
@pytest.mark.spark
def test_maintenance_keeps_the_ledger_and_cleans_the_log(
    lake: Lake, path: Path, spark: SparkSession
) -> None:
    """VACUUM of Spark deletes files without a commit, but not in folders with an underscore."""
    assert delete(lake, path, 1) == 0
    DeltaTable(str(path)).create_checkpoint()
    write(path, 20)
    long_ago = time.time() - 10 * 24 * 3600
    entries = sorted((path / "_delta_log").glob("*.json"))
    orphan = path / "part-orphan.parquet"
    orphan.touch()
    checksum_of_entry = path / "_delta_log" / "00000000000000000003.crc"
    checksum_of_entry.touch()
    checksum_of_file = path / ".part-deleted.parquet.crc"
    checksum_of_file.touch()
    checkpoints = (path / "_delta_log").glob("*.checkpoint.parquet")
    for file in [*entries[:11], *checkpoints, orphan, ledger(path), checksum_of_file]:
        os.utime(file, (long_ago, long_ago))
    later = path / "part-later.parquet"
    later.touch()
    os.utime(later, (time.time() - 24.5 * 3600,) * 2)
    maintain_table(lambda: spark, lake, str(path), 24.9)
    assert later.exists(), "Delta ignores a fraction of an hour"
    assert ledger(path).exists()
    assert not orphan.exists()
    assert len(data_files(path)) >= 11
    assert not entries[0].exists()
    assert not checksum_of_entry.exists()
    assert not checksum_of_file.exists()
    assert entries[-1].exists()
    assert ids(path) == list(range(20, 1020))

    # The limit of the log follows the settings, and the owner's own limit stays.
    assert retentions(path) == ("interval 168 hours", "interval 1500 minutes")
    for _ in range(2):
        maintain_table(lambda: spark, lake, str(path), 1)
        assert retentions(path) == ("interval 168 hours", "interval 1440 minutes")
    assert not later.exists()
    operations = [entry["operation"] for entry in DeltaTable(str(path)).history()]
    assert operations.count("SET TBLPROPERTIES") == 2
    assert owner_hours(DeltaTable(str(path)).metadata().configuration) == 0
    maintain_table(lambda: spark, lake, str(path), 200.5)
    assert retentions(path) == ("interval 201 hours", "interval 12060 minutes")
    own = {LOG_RETENTION: "interval 9 days", FILE_RETENTION: "interval 8 days"}
    DeltaTable(str(path)).alter.set_table_properties(own)
    maintain_table(lambda: spark, lake, str(path), 1)
    assert retentions(path) == ("interval 9 days", "interval 8 days")
    assert owner_hours(DeltaTable(str(path)).metadata().configuration) == 192


def retentions(path: Path) -> tuple[str, str]:
    """Return for how long a table keeps log entries and replaced files."""
    configuration = DeltaTable(str(path)).metadata().configuration
    return configuration[LOG_RETENTION], configuration[FILE_RETENTION]
