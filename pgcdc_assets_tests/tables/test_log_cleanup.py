"""The removal of old log entries of an SCD table, which needs no Spark."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.delta.log_entries import FOLDER, LAST_CHECKPOINT, SET_ASIDE
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.checkpoints import WITHOUT_UPKEEP
from pgcdc_assets.tables.maintenance import maintain_table
from pgcdc_assets.tables.properties import (
    FILE_RETENTION,
    LOG_RETENTION,
    OWN_FILE_RETENTION,
    OWN_LOG_RETENTION,
)
from pgcdc_assets.tables.state import advance_watermark, open_table, table_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LIMITS = {
    LOG_RETENTION: "interval 168 hours",
    OWN_LOG_RETENTION: "interval 168 hours",
    FILE_RETENTION: "interval 24 hours",
    OWN_FILE_RETENTION: "interval 24 hours",
}
_PARTS = 2


def no_spark() -> SparkSession:
    raise AssertionError("Spark was asked for")


def settled_table(path: str, version: int) -> None:
    """Create a table with the limits of a maintained table, and commit up to a version."""
    Path(path).mkdir(parents=True)
    write_deltalake(path, pa.table({"id": [1]}))
    DeltaTable(path).alter.set_table_properties(_LIMITS, raise_if_not_exists=False)
    commit(path, version - 1)


def commit(path: str, count: int) -> None:
    """Commit versions without rows."""
    table = DeltaTable(path)
    for _ in range(count):
        table.create_write_transaction(
            [], "append", table.schema(), post_commithook_properties=WITHOUT_UPKEEP
        )
        table.update_incremental()


def make_old(path: str) -> None:
    then = time.time() - 8 * 86_400
    for file in Path(path).rglob("*"):
        os.utime(file, (then, then))


def spoil_checkpoint(path: str, version: int, how: str) -> None:
    """Leave one of two parts of a checkpoint, or an empty file."""
    whole = Path(path, FOLDER, f"{version:020d}.checkpoint.parquet")
    if how == "empty":
        whole.write_bytes(b"")
        return
    rows, part = pq.read_table(whole), int(how)
    half = (rows.num_rows + 1) // _PARTS
    name = f"{version:020d}.checkpoint.{part:010d}.{_PARTS:010d}.parquet"
    pq.write_table(rows.slice((part - 1) * half, half), whole.with_name(name))
    whole.unlink()


@pytest.mark.parametrize("how", ["1", "2", "empty"])
@pytest.mark.parametrize("has_earlier", [False, True])
def test_an_unusable_checkpoint_does_not_cost_the_log(
    lake: Lake, how: str, has_earlier: bool
) -> None:
    """A Spark was killed between two parts, or the power failed. Readers ignore the checkpoint."""
    path = lake.path("t")
    settled_table(path, 5)
    hint = Path(path, LAST_CHECKPOINT)
    if has_earlier:
        DeltaTable(path).create_checkpoint()
    earlier = hint.read_text() if has_earlier else None
    commit(path, 5)
    DeltaTable(path).create_checkpoint()
    spoil_checkpoint(path, 10, how)
    # A writer replaces the hint after it has written the whole checkpoint.
    if earlier is None:
        hint.unlink()
    else:
        hint.write_text(earlier)
    commit(path, 4)
    make_old(path)
    assert DeltaTable(path).to_pyarrow_table().num_rows == 1
    maintain_table(no_spark, lake, path, 1)
    assert DeltaTable(path).to_pyarrow_table().num_rows == 1
    assert not Path(path, FOLDER, f"{0:020d}.json").exists(), "the old entries are removed"


@pytest.mark.parametrize("how", ["1", "2", "empty"])
def test_a_table_whose_hint_names_an_unusable_checkpoint_is_read(lake: Lake, how: str) -> None:
    """The power failed after the checkpoint, or a backup lacks a part. Spark ignores the hint."""
    path = lake.path("t")
    settled_table(path, 10)
    DeltaTable(path).create_checkpoint()
    spoil_checkpoint(path, 10, how)
    with pytest.raises(DeltaError):
        DeltaTable(path)
    table = open_table(lake, path)
    assert table is not None
    assert table.version() == 10
    assert table.to_pyarrow_table().num_rows == 1


@pytest.mark.parametrize("value", ["false", "FALSE", "true"])
def test_the_owner_of_a_table_can_keep_its_log(lake: Lake, value: str) -> None:
    path = lake.path("t")
    settled_table(path, 5)
    setting = {"delta.enableExpiredLogCleanup": value}
    DeltaTable(path).alter.set_table_properties(setting, raise_if_not_exists=False)
    DeltaTable(path).create_checkpoint()
    commit(path, 2)
    make_old(path)
    maintain_table(no_spark, lake, path, 1)
    is_kept = Path(path, FOLDER, f"{0:020d}.json").exists()
    assert is_kept == (value != "true")


def test_the_commit_of_a_watermark_removes_no_entry(zone: RawZone) -> None:
    path = table_path(zone.lake, zone.name, "shop", "items", 1)
    settled_table(path, 10)
    advance_watermark(zone, path, None, Position(1, Lsn(0x100)))
    DeltaTable(path).create_checkpoint()
    spoil_checkpoint(path, DeltaTable(path).version(), "1")
    Path(path, LAST_CHECKPOINT).unlink()
    make_old(path)
    before = set(Path(path, FOLDER).glob("*.json"))
    advance_watermark(zone, path, Position(1, Lsn(0x100)), Position(1, Lsn(0x200)))
    assert before < set(Path(path, FOLDER).glob("*.json"))
    assert DeltaTable(path).to_pyarrow_table().num_rows == 1


def test_the_log_of_a_table_with_further_features_is_kept(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint by delta-rs might lack what the feature needs."""
    path = lake.path("t")
    settled_table(path, 10)
    protocol = (
        '{"protocol":{"minReaderVersion":1,"minWriterVersion":7,'
        '"writerFeatures":["rowTracking","domainMetadata"]}}'
    )
    for entry in Path(path, FOLDER).glob("*.json"):
        lines = entry.read_text().splitlines()
        changed = [protocol if line.startswith('{"protocol"') else line for line in lines]
        entry.write_text("\n".join(changed))
    assert DeltaTable(path).protocol().writer_features == ["rowTracking", "domainMetadata"]
    make_old(path)
    before = set(Path(path, FOLDER).iterdir())

    def fail(*_: object) -> NoReturn:
        raise AssertionError("a checkpoint was written")

    monkeypatch.setattr(DeltaTable, "create_checkpoint", fail)
    maintain_table(no_spark, lake, path, 1)
    assert set(Path(path, FOLDER).iterdir()) == before


def test_a_log_that_was_set_aside_needs_no_vacuum(lake: Lake) -> None:
    path = lake.path("t")
    settled_table(path, 5)
    Path(path, f"{SET_ASIDE}1_{0:020d}.json").write_text("{}")
    make_old(path)
    maintain_table(no_spark, lake, path, 1)
