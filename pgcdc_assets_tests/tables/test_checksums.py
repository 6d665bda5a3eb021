"""Checksums of Spark beside files that delta-rs replaces and that this package deletes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.raw.delta.files import filesystem, write_file
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.checkpoints import is_due, keep_checkpoints
from pgcdc_assets.tables.checksums import (
    checksum_path,
    delete_checksums_of_log,
    delete_checksums_without_files,
    delete_drafts_of_log,
)
from pgcdc_assets.tables.vacuum import delete_replaced_files


@pytest.fixture
def path(lake: Lake) -> Path:
    return Path(lake.path("t"))


def append(path: Path) -> None:
    write_deltalake(str(path), pa.table({"id": [1]}), mode="append")


@pytest.mark.sampled
@pytest.mark.spark
def test_spark_can_read_a_checkpoint_of_delta_rs_after_its_own(
    lake: Lake, path: Path, spark: SparkSession
) -> None:
    """Delta repeats a refused read three times, with a pause of a second, and logs a warning."""
    for _ in range(11):
        spark.range(1).write.format("delta").mode("append").save(str(path))
    last = path / "_delta_log" / "_last_checkpoint"
    checksum = Path(checksum_path(str(last)))
    assert checksum.exists()
    for _ in range(10):
        before = DeltaTable(str(path))
        append(path)
        is_removed, version = not checksum.exists(), before.version() + 1
        keep_checkpoints(lake, str(path), before)
        is_written = is_due(str(path), version, 10)
        assert checksum.exists() == (not is_written and not is_removed)
        if is_written:
            assert f'"version":{version}' in last.read_text()
    assert not checksum.exists()
    assert spark.read.format("delta").load(str(path)).count() == 21


def test_a_table_with_few_versions_has_no_checkpoint(lake: Lake, path: Path) -> None:
    append(path)
    for _ in range(9):
        before = DeltaTable(str(path))
        append(path)
        keep_checkpoints(lake, str(path), before)
    assert not (path / "_delta_log" / "_last_checkpoint").exists()


def test_the_tables_of_one_merge_write_checkpoints_in_different_merges() -> None:
    paths = [f"/lake/shop/scd1/public/orders_{number}" for number in range(100)]
    due = [[path for path in paths if is_due(path, version, 10)] for version in range(40, 50)]
    assert sorted(path for each in due for path in each) == sorted(paths)
    assert max(map(len, due)) < 20


@pytest.mark.parametrize("first", [0, 1])
def test_a_merge_of_two_commits_writes_the_checkpoint_of_either(
    lake: Lake, path: Path, first: int
) -> None:
    """The first commit is by Spark, so only every second version is looked at."""
    for _ in range(10 + first):
        append(path)
    for _ in range(10):
        append(path)
        before = DeltaTable(str(path))
        append(path)
        keep_checkpoints(lake, str(path), before, commits=2)
    checkpoints = sorted((path / "_delta_log").glob("*.checkpoint.parquet"))
    assert len(checkpoints) == 2
    found = [int(file.name.partition(".")[0]) for file in checkpoints]
    assert found[1] - found[0] == 10


def test_checksums_of_deleted_log_entries_are_deleted(lake: Lake, path: Path) -> None:
    for _ in range(4):
        append(path)
    log = path / "_delta_log"
    names = ["{:020d}.crc", ".{:020d}.json.crc", ".{:020d}.crc.crc"]
    for version in range(4):
        for name in names:
            (log / name.format(version)).touch()
    others = [log / "._last_checkpoint.crc", log / "notes.crc"]
    for file in others:
        file.touch()
    assert delete_checksums_of_log(lake, str(path)) == 0
    for version in range(2):
        (log / f"{version:020d}.json").unlink()
    assert delete_checksums_of_log(lake, str(path)) == 2 * len(names)
    left = {file.name for file in log.iterdir() if file.suffix == ".crc"}
    kept = {name.format(version) for name in names for version in (2, 3)}
    assert left == kept | {file.name for file in others}


def test_checksums_in_an_s3_store_are_deleted(s3_lake: Lake) -> None:
    uri = s3_lake.path("t")
    for _ in range(3):
        write_deltalake(
            uri, pa.table({"id": [1]}), mode="append", storage_options=s3_lake.delta_options
        )
    files = filesystem(s3_lake, uri)
    for version in range(3):
        write_file(files, f"_delta_log/{version:020d}.crc", b"{}")
    assert delete_checksums_of_log(s3_lake, uri) == 0
    files.delete_file(f"_delta_log/{0:020d}.json")
    assert delete_checksums_of_log(s3_lake, uri) == 1
    left = {info.base_name for info in files.get_file_info(pafs.FileSelector("_delta_log"))}
    assert {name for name in left if name.endswith(".crc")} == {f"{n:020d}.crc" for n in (1, 2)}


def test_without_log_entries_no_checksum_is_deleted(lake: Lake, path: Path) -> None:
    append(path)
    log = path / "_delta_log"
    (log / f"{0:020d}.crc").touch()
    (log / f"{0:020d}.json").unlink()
    assert delete_checksums_of_log(lake, str(path)) == 0


def test_checksums_of_deleted_data_files_are_deleted_after_an_hour(path: Path) -> None:
    part = path / "_is_current=true"
    log = path / "_delta_log"
    for folder in (part, log):
        folder.mkdir(parents=True)
    there = part / "part-0.parquet"
    old, young = part / ".part-1.parquet.crc", part / ".part-2.parquet.crc"
    of_log = log / f".{0:020d}.json.crc"
    there.touch()
    long_ago = time.time() - 7200
    for file in (old, of_log, Path(checksum_path(str(there)))):
        file.touch()
        os.utime(file, (long_ago, long_ago))
    young.touch()
    assert delete_checksums_without_files(str(path)) == 1
    assert not old.exists()
    assert young.exists()
    assert of_log.exists()
    assert Path(checksum_path(str(there))).exists()


def test_drafts_of_log_entries_are_deleted_after_an_hour(path: Path) -> None:
    """Each commit of Spark on a full disk leaves two files, which no VACUUM deletes."""
    append(path)
    log, uuid = path / "_delta_log", "4c165f26-5145-4058-8a2a-4ced3b2cb556"
    drafts = [log / f".{5:020d}.json.{uuid}.tmp", log / f"..{5:020d}.json.{uuid}.tmp.crc"]
    young, other = log / f".{6:020d}.json.{uuid}.tmp", log / f".{0:020d}.json.crc"
    for file in (*drafts, young, other):
        file.touch()
    long_ago = time.time() - 7200
    for file in (*drafts, other, log / f"{0:020d}.json"):
        os.utime(file, (long_ago, long_ago))
    assert delete_drafts_of_log(str(path)) == 2
    assert sorted(log.iterdir()) == sorted([log / f"{0:020d}.json", young, other])


def test_a_replaced_file_is_deleted_with_its_checksum(lake: Lake, path: Path) -> None:
    append(path)
    (replaced,) = path.glob("*.parquet")
    checksum = Path(checksum_path(str(replaced)))
    checksum.touch()
    write_deltalake(str(path), pa.table({"id": [2]}), mode="overwrite")
    assert delete_replaced_files(lake, str(path), 0.0).deleted_files == 1
    assert not replaced.exists()
    assert not checksum.exists()
