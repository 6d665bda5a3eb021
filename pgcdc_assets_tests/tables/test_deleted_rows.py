"""Counts of the rows that deletion vectors remove."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from pgcdc_assets.raw.delta.files import filesystem, write_file
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.session import own_sessions
from pgcdc_assets.tables import deleted_rows as module
from pgcdc_assets.tables.deleted_rows import deleted_rows

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def path(embedded_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table with files that have a deletion vector, a replaced one, or none."""
    path = str(tmp_path_factory.mktemp("table"))
    embedded_session.sql(
        f"CREATE TABLE delta.`{path}` (id BIGINT) USING delta "
        "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'delta.checkpointInterval' = '4')"
    )
    for first in (0, 100, 200):
        rows = embedded_session.range(first, first + 100).repartition(1)
        rows.write.format("delta").mode("append").save(path)
    for condition in ("id < 10", "id IN (50, 150, 151)", "id = 60", "id BETWEEN 70 AND 72"):
        embedded_session.sql(f"DELETE FROM delta.`{path}` WHERE {condition}").collect()
    return path


def counted(path: str, version: int | None = None) -> dict[str, int]:
    table = DeltaTable(path, version=version)
    return deleted_rows(Lake(path), path, table, pa.table(table.get_add_actions(flatten=True)))


@pytest.mark.sampled
@pytest.mark.parametrize("version", [0, 3, 4, 5, 7])
def test_the_counts_of_the_log_are_those_of_the_vectors(
    path: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_vectors = counted(path, version)
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    of_log = counted(path, version)
    assert of_log == of_vectors
    assert sorted(of_log.values()) == {0: [], 3: [], 4: [10], 5: [2, 11], 7: [2, 15]}[version]


def test_a_large_table_is_counted_without_its_vectors(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = str(tmp_path / "copy")
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.bin"))
    assert (Path(copy) / "_delta_log" / "_last_checkpoint").exists()
    with pytest.raises(DeltaError):
        counted(copy)
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    assert sum(counted(copy).values()) == 17


# Contents of `_last_checkpoint`, which Delta reads as a hint.
_HINTS = {
    "lost": None,
    "empty": "",
    "truncated": '{"version":4,"si',
    "no object": "[4]",
    "no version": '{"size":7}',
    "names a deleted checkpoint": '{"version":2,"size":7}',
}


@pytest.mark.parametrize("hint", _HINTS.values(), ids=_HINTS)
def test_a_table_without_a_usable_hint_is_counted_from_the_newest_checkpoint(
    hint: str | None, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_with_hint(path, tmp_path, hint, "*.bin")
    delete_commits(copy, 4)
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    assert sorted(counted(str(copy)).values()) == [2, 15]
    assert sorted(counted(str(copy), 5).values()) == [2, 11]


def test_a_version_before_the_newest_checkpoint_is_counted_from_the_one_before(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_with_hint(path, tmp_path, None, "*.bin")
    DeltaTable(copy).create_checkpoint()
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    assert sorted(counted(str(copy), 5).values()) == [2, 11]
    delete_commits(copy, 4)
    assert sorted(counted(str(copy), 6).values()) == [2, 12]


def test_a_stale_hint_names_a_checkpoint_that_is_behind_the_log(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer ended between a checkpoint and its hint, and the log was shortened since."""
    hint = (Path(path) / "_delta_log" / "_last_checkpoint").read_text()
    copy = copy_with_hint(path, tmp_path, None, "*.bin")
    DeltaTable(copy).create_checkpoint()
    (copy / "_delta_log" / "_last_checkpoint").write_text(hint)
    delete_commits(copy, 7)
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    assert sorted(counted(str(copy)).values()) == [2, 15]


def test_the_checkpoints_of_an_object_store_are_listed(
    path: str, tmp_path: Path, s3_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_with_hint(path, tmp_path, None, "*.bin")
    delete_commits(copy, 4)
    store = filesystem(s3_lake, s3_lake.uri)
    for file in (copy / "_delta_log").glob("0*"):
        write_file(store, f"_delta_log/{file.name}", file.read_bytes())
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    table = DeltaTable(s3_lake.uri, storage_options=s3_lake.delta_options)
    files = pa.table(table.get_add_actions(flatten=True))
    assert sorted(deleted_rows(s3_lake, s3_lake.uri, table, files).values()) == [2, 15]


def test_a_checkpoint_in_parts_is_left_to_delta_rs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = json.loads((Path(path) / "_delta_log" / "_last_checkpoint").read_text())
    for name, content in (("hinted", json.dumps({**hint, "parts": 1})), ("listed", None)):
        copy = copy_with_hint(path, tmp_path / name, content)
        [checkpoint] = (copy / "_delta_log").glob("*.checkpoint.parquet")
        checkpoint.rename(checkpoint.with_suffix(f".{1:010d}.{1:010d}.parquet"))
        delete_commits(copy, 4)
        monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
        assert sum(counted(str(copy)).values()) == 17
        for vector in copy.glob("*.bin"):
            vector.unlink()
        with pytest.raises(DeltaError):
            counted(str(copy))


@pytest.mark.sampled
def test_a_checkpoint_with_its_adds_in_other_files_is_left_to_delta_rs(
    embedded_session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a checkpoint may have the name of a single file."""
    path = str(tmp_path / "table")
    with own_sessions(embedded_session, 1) as (session,):
        session.conf.set("spark.databricks.delta.checkpointV2.topLevelFileFormat", "parquet")
        session.sql(
            f"CREATE TABLE delta.`{path}` USING delta TBLPROPERTIES ("
            "'delta.enableDeletionVectors' = 'true', 'delta.checkpointPolicy' = 'v2', "
            "'delta.checkpointInterval' = '1') AS SELECT id FROM range(0, 100, 1, 1)"
        )
        session.sql(f"DELETE FROM delta.`{path}` WHERE id < 10").collect()
    log = tmp_path / "table" / "_delta_log"
    [checkpoint] = log.glob("*.checkpoint.*.parquet")
    checkpoint.rename(log / f"{1:020d}.checkpoint.parquet")
    (log / "_last_checkpoint").unlink()
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    assert list(counted(path).values()) == [10]


def copy_with_hint(path: str, folder: Path, hint: str | None, *ignored: str) -> Path:
    """Copy a table, with another `_last_checkpoint` or without it, and without ignored files."""
    copy = folder / "copy"
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.crc", *ignored))
    last = copy / "_delta_log" / "_last_checkpoint"
    last.unlink()
    if hint is not None:
        last.write_text(hint)
    return copy


def delete_commits(table: Path, count: int) -> None:
    """Delete the oldest commits of a table's log, as the daily job does."""
    for version in range(count):
        (table / "_delta_log" / f"{version:020d}.json").unlink()
