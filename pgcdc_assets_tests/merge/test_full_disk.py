"""Merges, rebuilds and maintenance on a full disk: a limit on file sizes simulates one (H7)."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.errors import TransientError
from pgcdc_assets.merge import MergeFailure, merge_tables, rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.maintenance import maintain_table
from pgcdc_assets.tables.state import advance_watermark, read_scd_state
from pgcdc_assets_tests.support.full_disk import full_disk
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

pytestmark = pytest.mark.spark


@pytest.fixture
def jvm(spark: SparkSession, spark_kind: str, request: pytest.FixtureRequest) -> int:
    """Return the pid of the session's JVM."""
    if spark_kind == "connect":
        pid = request.getfixturevalue("spark_server").pid
    else:
        pid = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    assert isinstance(pid, int)
    return pid


def _land_two_rows(zone: RawZone) -> Landing:
    """Land a snapshot of one row, and the insert of another."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([insert("2", "b")])
    return landing


@pytest.mark.parametrize("scd", [1, 2])
def test_the_error_names_the_folder_and_the_next_merge_continues(
    spark: SparkSession, zone: RawZone, jvm: int, monkeypatch: pytest.MonkeyPatch, scd: int
) -> None:
    merge_by_spark(monkeypatch)
    target = CdcTable("shop", "items", scd=(scd,))
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([insert("3", "c")])
    path = merge(spark, landing, target).path
    landing.land([update("1", "A"), insert("4", "d")])
    with full_disk(1_000, jvm):
        (failure,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TransientError)
    assert f"File too large. Nothing of it was committed. Free space on the disk of {path}" in str(
        failure.error
    )
    merge(spark, landing, target)
    rows = spark.read.format("delta").load(path)
    current = rows.where("_is_current") if scd == 2 else rows
    assert sorted(tuple(row) for row in current.select("id", "v").collect()) == [
        (1, "A"),
        (2, "b"),
        (3, "c"),
        (4, "d"),
    ]


def test_the_error_of_a_maintenance_names_the_disks(
    spark: SparkSession, zone: RawZone, jvm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_by_spark(monkeypatch)
    landing = _land_two_rows(zone)
    path = merge(spark, landing, CdcTable("shop", "items")).path
    with (
        full_disk(1_000, jvm),
        pytest.raises(TransientError, match=r"File too large\. Free space .*spark\.local\.dir"),
    ):
        maintain_table(lambda: spark, zone.lake, path, 24)
    maintain_table(lambda: spark, zone.lake, path, 24)
    assert spark.read.format("delta").load(path).count() == 2


def test_a_maintenance_deletes_files_before_it_writes(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, a VACUUM after the OPTIMIZE would never come."""
    merge_by_spark(monkeypatch)
    landing = _land_two_rows(zone)
    path = merge(spark, landing, CdcTable("shop", "items")).path
    spark.read.format("delta").load(path).write.format("delta").mode("append").save(path)
    orphan = Path(path, "part-orphan.parquet")
    orphan.touch()
    os.utime(orphan, (0, 0))
    for file in DeltaTable(path).file_uris():
        Path(file).unlink()
    with pytest.raises(TransientError, match=r"The maintenance of .* failed"):
        maintain_table(lambda: spark, zone.lake, path, 24)
    assert not orphan.exists()


@pytest.mark.parametrize("scd", [1, 2])
def test_a_merge_without_spark_leaves_no_file_whose_commit_does_not_fit(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, scd: int
) -> None:
    """Each attempt left the rows of the whole table. Spark tried it then, and left a part."""
    target = CdcTable("shop", "items", scd=(scd,))
    landing = _land_two_rows(zone)
    path = merge(spark, landing, target).path
    landing.land([update("1", "A")])
    with ExitStack() as disks, monkeypatch.context() as patch:
        _fill_at(patch, failpoints.BEFORE_BATCH_COMMIT, os.getpid(), disks)
        (failure,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert f"File too large. Nothing of it was committed. Free space on the disk of {path}" in str(
        failure.error
    )
    assert {file.name for file in Path(path).rglob("*.parquet")} == {
        name.rpartition("/")[2] for name in DeltaTable(path).file_uris()
    }
    merge(spark, landing, target)


def test_a_watermark_that_does_not_fit_names_the_folder_and_the_remedy(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = _land_two_rows(zone)
    target = CdcTable("shop", "items")
    path = merge(spark, landing, target).path
    state = read_scd_state(zone.lake, zone.name, path)
    assert state is not None
    assert state.watermark is not None
    with full_disk(100), pytest.raises(TransientError) as raised:
        advance_watermark(zone, path, state.watermark, state.watermark)
    assert f"{path} cannot be written: " in str(raised.value)
    assert ": File too large (os error 27). Check that the lake has space" in str(raised.value)


def test_a_rebuild_names_the_disk_of_each_of_its_steps(
    spark: SparkSession, zone: RawZone, jvm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit by delta-rs, and the properties by Spark after it."""
    target = CdcTable("shop", "items")
    columns = (column("id"), column("v", "text"))
    landing = Landing(zone, [relation(*columns), relation(*columns, column("w", "text"))])
    landing.begin([["1", "a"]])
    end = landing.land([insert("2", "b")]).end
    landing.land([insert("3", "c", "x", version=2)])
    path = merge(spark, landing, target).path
    for point, pid in (
        (failpoints.AFTER_REBUILD_MOVED, os.getpid()),
        (failpoints.AFTER_REBUILD_COMMIT, jvm),
    ):
        with ExitStack() as disk, monkeypatch.context() as patch:
            _fill_at(patch, point, pid, disk)
            with pytest.raises(TransientError, match=r"File too large.* space") as raised:
                rebuild_table(spark, zone, target, 1, end)
        assert path in str(raised.value)
    rebuild_table(spark, zone, target, 1)
    assert spark.read.format("delta").load(path).count() == 3


def _fill_at(patch: pytest.MonkeyPatch, point: str, pid: int, disk: ExitStack) -> None:
    """Let a process write no file from a failpoint on, until the end of a block."""
    earlier = failpoints.reach

    def reach(name: str) -> None:
        earlier(name)
        if name == point:
            disk.enter_context(full_disk(100, pid))

    patch.setattr(failpoints, "reach", reach)
