"""Random histories of SCD1 tables, cut at random into windows and runs, by both ways of a merge."""

from __future__ import annotations

import random

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Version, Versions
from pgcdc_assets_tests.support.merge.random_history import (
    comparable_row,
    cuts,
    merge_random_history,
    stored_row,
)
from pgcdc_assets_tests.support.merge.small_tables import (
    merge_by_spark,
    merge_together,
    merges_by_spark,
)

pytestmark = pytest.mark.spark

_TARGET = CdcTable("shop", "items")


@pytest.mark.sampled
@cuts("some", "many")
@pytest.mark.parametrize("truncates", [False, True], ids=["plain", "truncate"])
@pytest.mark.parametrize("identity", ["d", "f", "p"], ids=["default", "full", "part"])
@pytest.mark.parametrize(
    "is_by_spark",
    [
        pytest.param(False, id="together"),
        pytest.param(True, id="by spark", marks=pytest.mark.soak),
    ],
)
def test_the_rows_are_exact_for_any_cut_into_windows_and_runs(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
    identity: str,
    truncates: bool,
    pieces: tuple[int, int],
    is_by_spark: bool,
) -> None:
    """D1 to D9: changed and reused keys, TOAST, TRUNCATE and rescued values."""
    (merge_by_spark if is_by_spark else merge_together)(monkeypatch)
    expected = Versions(key=(0, 1))
    report = merge_random_history(spark, zone, rng, _TARGET, expected, identity, pieces, truncates)
    found = spark.read.format("delta").load(report.path).collect()
    assert sorted(map(stored_row, found)) == sorted(
        comparable_row(version.row) for version in expected.open.values()
    )
    assert report.row_count == len(expected.open)
    assert bool(merges_by_spark(report.path)) == is_by_spark
    rescued = sum(map(_is_rescued, expected.open.values()))
    assert sum(1 for row in found if row["_rescued"]) == rescued
    # The report counts the rows of the last run only.
    assert report.rows_rescued == rescued if pieces[1] == 1 else report.rows_rescued <= rescued


def _is_rescued(version: Version) -> bool:
    return version.row[3] == "NaN"
