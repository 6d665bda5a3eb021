"""The data files that are written without Spark: other readers find all rows, and none is lost."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables
from pgcdc_assets.merge.batch import commit
from pgcdc_assets.raw.retention import remove_windows
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.session_settings import session_settings
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import (
    forget_rows,
    merge_together,
    merges_by_spark,
)

pytestmark = pytest.mark.spark

_ITEMS = CdcTable("shop", "items")
_REBASE = "spark.sql.parquet.datetimeRebaseModeInRead"


@pytest.fixture(autouse=True)
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    merge_together(monkeypatch)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["float8", "float4"])
def test_filters_on_files_find_nan_and_negative_zero(
    spark: SparkSession, zone: RawZone, kind: str
) -> None:
    """Spark compares a filter with the statistics and the dictionary of a file."""
    landing = Landing(zone, [relation(column("id"), column("f", kind))])
    landing.begin([["1", "NaN"], ["2", "0.5"], ["3", "-1"], ["4", "-0"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    assert merges_by_spark(path) == 0
    expected = {
        "f > 1": [1],
        "f >= 2": [1],
        "f = double('NaN')": [1],
        "NOT f <= 1": [1],
        "f = 0": [4],
        "f IN (0, 7)": [4],
        "f <> 0.5": [1, 3, 4],
    }
    found = {
        condition: sorted(
            row["id"]
            for row in spark.sql(f"SELECT id FROM {delta_table(path)} WHERE {condition}").collect()
        )
        for condition in expected
    }
    assert found == expected


@pytest.mark.parametrize("mode", ["EXCEPTION", "LEGACY"])
def test_old_dates_are_read_alike_by_all_settings(
    spark: SparkSession, zone: RawZone, mode: str
) -> None:
    landing = Landing(zone, [relation(column("id"), column("d", "date"))])
    landing.begin([["1", "1000-01-01"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    assert merges_by_spark(path) == 0
    with session_settings(spark, {_REBASE: mode}):
        (row,) = spark.sql(f"SELECT CAST(d AS STRING) AS d FROM {delta_table(path)}").collect()
    assert row["d"] == "1000-01-01"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "text", "setting", "reason"),
    [
        ("timestamptz", "9999-12-31 00:00:00+00", ("outputTimestampType", "INT96"), ""),
        ("date", "1000-01-01", ("datetimeRebaseModeInWrite", "LEGACY"), "by the old calendar"),
    ],
    ids=["INT96", "LEGACY"],
)
def test_values_in_the_form_of_another_session_stay(
    spark: SparkSession,
    zone: RawZone,
    kind: str,
    text: str,
    setting: tuple[str, str],
    reason: str,
) -> None:
    """The owner rewrites a table in a session with other settings: INT96 is Spark's default."""
    landing = Landing(zone, [relation(column("id"), column("at", kind), column("v", "text"))])
    landing.begin([["1", text, "a"], ["2", text, "b"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    values = f"SELECT id, CAST(at AS STRING) AS at FROM {delta_table(path)} ORDER BY id"
    before = spark.sql(values).collect()
    with session_settings(spark, {f"spark.sql.parquet.{setting[0]}": setting[1]}):
        rows = spark.read.format("delta").load(path)
        rows.write.format("delta").mode("overwrite").save(path)
    landing.land([update("2", text, "c")])
    report = merge(spark, landing, _ITEMS)
    assert spark.sql(values).collect() == before
    assert report.spark_reason.endswith(reason) and bool(report.spark_reason) == bool(reason)


def test_a_first_commit_whose_answer_is_lost_keeps_its_files(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a hard link whose answer is lost, and then says that it exists."""
    real = os.link

    def link(source: Any, target: Any) -> None:
        real(source, target)
        raise FileExistsError

    monkeypatch.setattr(os, "link", link)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    assert [Path(uri).exists() for uri in DeltaTable(path).file_uris()] == [True]
    assert spark.read.format("delta").load(path).count() == 1


def test_a_commit_whose_answer_is_lost_keeps_its_files(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([])
    path = merge(spark, landing, _ITEMS).path
    landing.land([insert("2", "b")])
    real = DeltaTable.create_write_transaction

    def commit_twice(self: DeltaTable, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        raise CommitFailedError("the version exists")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", commit_twice)
    merge(spark, landing, _ITEMS)
    assert spark.read.format("delta").load(path).count() == 2


def test_a_full_disk_before_the_first_commit_leaves_no_file(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history whose first changes are removed cannot be made beside files of an earlier one."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([insert("2", "b")])
    landing.land([insert("3", "c")])
    merge(spark, landing, _ITEMS)
    removed = remove_windows(
        zone, 1, landing.windows[-1].end, dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    )
    assert removed.row_count == 2
    landing.copy([["1", "a"], ["2", "b"], ["3", "c"]])
    landing.land([insert("4", "d")])
    history = CdcTable("shop", "items", scd=(2,))

    def fail(name: str) -> None:
        if name == failpoints.BEFORE_BATCH_COMMIT:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("pgcdc_assets.merge.run._merge_in_threads", lambda *_: iter(()))
    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "reach", fail)
        (failure,) = merge_tables(spark, zone, [history], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert "No space left on device. Nothing of it was committed" in str(failure.error)
    (found,) = merge_tables(spark, zone, [history], landing.windows[-1])
    assert isinstance(found, MergeReport), found.error


def test_a_file_of_large_texts_is_refused_before_it_is_read(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are decoded a thousand at a time, which may be a gigabyte."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([[str(number), f"{number}" + "x" * 10_000] for number in range(20)])
    landing.land([])
    merge(spark, landing, _ITEMS)
    landing.land([insert("100", "b")])
    forget_rows()

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("rows were read")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    monkeypatch.setattr(commit, "MOST_ROW_BYTES", 100_000)
    report = merge(spark, landing, _ITEMS)
    assert report.spark_reason == "its rows have more than 100,000 bytes in memory"
