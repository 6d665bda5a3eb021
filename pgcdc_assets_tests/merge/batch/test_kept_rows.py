"""The rows of data files that a process keeps for its next merge."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.merge.batch.kept_rows import KeptRows
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_together

ROWS = pa.table({"id": pa.array(range(1000), pa.int64()), "v": ["text"] * 1000})


def test_rows_are_kept_until_they_are_read_once() -> None:
    kept = KeptRows()
    kept.keep("a", ROWS)
    assert kept.pop("b") is None
    assert kept.pop("a") == ROWS
    assert kept.pop("a") is None


def test_the_files_that_were_kept_first_are_forgotten() -> None:
    kept = KeptRows(most_bytes=int(2.5 * ROWS.nbytes))
    for name in ("a", "b", "c"):
        kept.keep(name, ROWS)
    assert [kept.pop(name) is not None for name in ("a", "b", "c")] == [False, True, True]
    # What was read makes room.
    for name in ("d", "e"):
        kept.keep(name, ROWS)
    assert kept.pop("d") == kept.pop("e") == ROWS


def test_a_large_file_is_not_kept() -> None:
    kept = KeptRows(most_bytes_of_file=ROWS.nbytes - 1)
    kept.keep("a", ROWS)
    assert kept.pop("a") is None


def test_rows_of_one_table_do_not_keep_the_arrays_of_all() -> None:
    kept = KeptRows()
    kept.keep("a", ROWS.slice(10, 2))
    found = kept.pop("a")
    assert found == ROWS.slice(10, 2)
    assert found is not None
    assert found.get_total_buffer_size() < 200


@pytest.mark.spark
@pytest.mark.parametrize("scd", [1, 2])
def test_a_merge_does_not_read_what_its_process_has_written(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, scd: int
) -> None:
    """A file that was damaged since then is replaced."""
    merge_together(monkeypatch)
    target = CdcTable("shop", "items", scd=(scd,))
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    path = merge(spark, landing, target).path
    for file in DeltaTable(path).file_uris():
        Path(file).write_bytes(b"damaged")
    landing.land([update("2", "c"), insert("3", "d")])
    merge(spark, landing, target)
    rows = spark.read.format("delta").load(path)
    current = rows.where("_is_current") if scd == 2 else rows
    assert {(row["id"], row["v"]) for row in current.select("id", "v").collect()} == {
        (1, "a"),
        (2, "c"),
        (3, "d"),
    }
