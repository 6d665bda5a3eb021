"""Random histories, cut at random into windows and runs: Spark against a reference fold."""

from __future__ import annotations

import random

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Versions
from pgcdc_assets_tests.support.merge.random_history import (
    cases,
    comparable_row,
    cuts,
    merge_as_if_large,
    merge_random_history,
    stored_row,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.sampled
@cuts("some")
@cases("default-plain-large", "full-plain-small", "full-truncate-small", "part-plain-large")
def test_the_table_equals_postgres_for_any_cut_into_windows_and_runs(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
    identity: str,
    truncates: bool,
    is_large: bool,
    pieces: tuple[int, int],
) -> None:
    """D1, D2, D3, D4, D5, D6, D9, D14, H1: hundreds of histories against a reference fold."""
    merge_as_if_large(monkeypatch, is_large)
    expected = Versions(key=(0, 1))
    target = CdcTable("shop", "items")
    report = merge_random_history(spark, zone, rng, target, expected, identity, pieces, truncates)
    found = spark.read.format("delta").load(report.path).collect()
    held = [version.row for version in expected.open.values()]
    assert sorted(map(stored_row, found)) == sorted(map(comparable_row, held))
    assert report.row_count == len(held)
