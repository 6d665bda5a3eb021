"""The maintenance starts Spark only for a table whose VACUUM or OPTIMIZE could do something."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.session_settings import session_settings
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables import vacuum
from pgcdc_assets.tables.maintenance import maintain_table
from pgcdc_assets.tables.properties import (
    FILE_RETENTION,
    LOG_RETENTION,
    OWN_FILE_RETENTION,
    OWN_LOG_RETENTION,
)

KEEP_HOURS = 24.0
LONG_AGO = time.time() - 30 * 3600


class SparkNeeded(Exception):
    """Raised instead of a start of Spark."""


def refuse() -> SparkSession:
    raise SparkNeeded


def needs_spark(lake: Lake, path: Path) -> bool:
    try:
        maintain_table(refuse, lake, str(path), KEEP_HOURS)
    except SparkNeeded:
        return True
    return False


@pytest.fixture
def settled(lake: Lake) -> Path:
    """Return a partitioned table with one file and one replaced file, all old."""
    path = Path(lake.path("t"))
    for _ in range(2):
        write_deltalake(
            str(path),
            pa.table({"p": ["a"] * 3, "id": range(3)}),
            mode="overwrite",
            partition_by=["p"],
        )
    for name, own, limit in (
        (LOG_RETENTION, OWN_LOG_RETENTION, "interval 168 hours"),
        (FILE_RETENTION, OWN_FILE_RETENTION, "interval 24 hours"),
    ):
        set_properties(path, {name: limit, own: limit})
    for data in [*path.rglob("*.parquet")]:
        (data.parent / f".{data.name}.crc").touch()
    (path / "_delta_log" / "00000000000000000000.crc").touch()
    make_old(path)
    return path


def set_properties(path: Path, properties: dict[str, str]) -> None:
    DeltaTable(str(path)).alter.set_table_properties(properties, raise_if_not_exists=False)


def make_old(path: Path) -> None:
    for file in path.rglob("*"):
        os.utime(file, (LONG_AGO, LONG_AGO))


def test_a_table_without_unknown_files_needs_no_spark(lake: Lake, settled: Path) -> None:
    """Its files are those of the current version, replaced ones, checksums and the log."""
    version = DeltaTable(str(settled)).version()
    for _ in range(2):
        assert not needs_spark(lake, settled)
        # The first call has written the list of replaced files.
        make_old(settled)
    assert (settled / "_pgcdc" / "replaced_files.json").exists()
    assert len([*settled.rglob("part-*.parquet")]) == 2
    assert DeltaTable(str(settled)).version() == version


@pytest.mark.parametrize(
    "name",
    [
        "part-orphan.parquet",
        "p=a/part-orphan.parquet",
        "_change_data/cdc-1.parquet",
        "deletion_vector_1.bin",
        "a/b.txt",
        "checksum.crc",
    ],
)
def test_an_old_file_that_the_log_does_not_name_needs_a_vacuum(
    lake: Lake, settled: Path, name: str
) -> None:
    """A young one may belong to a merge that has not committed yet."""
    orphan = settled / name
    orphan.parent.mkdir(exist_ok=True)
    orphan.touch()
    assert not needs_spark(lake, settled)
    os.utime(orphan, (LONG_AGO, LONG_AGO))
    assert needs_spark(lake, settled)


def test_a_lost_list_of_replaced_files_is_read_again_from_the_log(
    lake: Lake, settled: Path
) -> None:
    assert not needs_spark(lake, settled)
    (settled / "_pgcdc" / "replaced_files.json").unlink()
    assert not needs_spark(lake, settled)
    # Nor does the log name the replaced file any more.
    (settled / "_pgcdc" / "replaced_files.json").unlink()
    DeltaTable(str(settled)).create_checkpoint()
    (settled / "_delta_log" / "00000000000000000001.json").unlink()
    assert needs_spark(lake, settled)


@pytest.mark.parametrize("what", ["size", "hours"])
def test_a_table_without_a_list_of_replaced_files_is_left_to_vacuum(
    lake: Lake, settled: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "size":
        monkeypatch.setattr(vacuum, "SMALL_TABLE_BYTES", 1)
    else:
        monkeypatch.setattr(vacuum, "LONGEST_KEEP_HOURS", 23.0)
    assert needs_spark(lake, settled)


@pytest.mark.parametrize("name", [LOG_RETENTION, FILE_RETENTION])
def test_another_limit_of_our_own_needs_spark(lake: Lake, settled: Path, name: str) -> None:
    own = OWN_LOG_RETENTION if name == LOG_RETENTION else OWN_FILE_RETENTION
    set_properties(settled, dict.fromkeys((name, own), "interval 200 hours"))
    assert needs_spark(lake, settled)


def test_a_second_file_of_a_partition_needs_an_optimize(lake: Lake, settled: Path) -> None:
    write_deltalake(str(settled), pa.table({"p": ["a"], "id": [3]}), mode="append")
    assert needs_spark(lake, settled)


def test_a_folder_without_a_table_is_left_alone(lake: Lake, tmp_path: Path) -> None:
    assert not needs_spark(lake, tmp_path / "nothing")


def test_a_folder_that_cannot_be_listed_is_named(
    lake: Lake, settled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pgcdc_assets.tables.maintenance.has_unknown_files", fail)
    with pytest.raises(TransientError, match=rf"{settled} cannot be listed \(Permission denied\)"):
        needs_spark(lake, settled)


@pytest.mark.sampled
@pytest.mark.spark
def test_vacuum_agrees_that_there_is_nothing_to_delete(
    lake: Lake, settled: Path, spark: SparkSession
) -> None:
    """Delta's own dry run is the oracle, without and with an orphan."""

    def found() -> int:
        vacuumed = spark.sql(f"VACUUM {delta_table(str(settled))} RETAIN 24 HOURS DRY RUN")
        return len([row for row in vacuumed.collect() if str(row[0]).endswith(".parquet")])

    unchecked = {
        "spark.databricks.delta.retentionDurationCheck.enabled": "false",
        "spark.databricks.delta.vacuum.retentionWindowIgnore.enabled": "false",
    }
    with session_settings(spark, unchecked):
        assert not needs_spark(lake, settled)
        assert found() == 0
        orphan = settled / "p=a" / "part-orphan.parquet"
        orphan.touch()
        os.utime(orphan, (LONG_AGO, LONG_AGO))
        assert needs_spark(lake, settled)
        assert found() == 1
    maintain_table(lambda: spark, lake, str(settled), KEEP_HOURS)
    assert not orphan.exists()
    assert not needs_spark(lake, settled)
