"""A merge on a full disk: a limit of the JVM on file sizes simulates one (H7)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.merge import MergeFailure, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.maintenance import maintain_table
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


@contextmanager
def _full_disk(pid: int) -> Iterator[None]:
    """Let a process write no file beyond 1,000 bytes in the block."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


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
    with _full_disk(jvm):
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
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([insert("2", "b")])
    path = merge(spark, landing, CdcTable("shop", "items")).path
    with (
        _full_disk(jvm),
        pytest.raises(TransientError, match=r"File too large\. Free space .*spark\.local\.dir"),
    ):
        maintain_table(lambda: spark, zone.lake, path, 24)
    maintain_table(lambda: spark, zone.lake, path, 24)
    assert spark.read.format("delta").load(path).count() == 2
