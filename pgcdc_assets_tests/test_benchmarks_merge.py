"""Benchmarks of merges at a small scale."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from pyspark.sql import SparkSession

from benchmarks import merge_arrays, workload
from benchmarks.merge import merge_orders
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path


@pytest.mark.sampled
@pytest.mark.postgres
@pytest.mark.spark
def test_arrays_are_merged_with_types_and_as_text(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    types: dict[bool, str] = {}

    def merge(spark: SparkSession, zone: Any, window: Any, table: CdcTable) -> tuple[float, int]:
        taken = merge_orders(spark, zone, window, table)
        path = table_path(zone.lake, zone.name, "public", "orders", 1)
        types[bool(table.types)] = dict(spark.read.format("delta").load(path).dtypes)["tags"]
        return taken

    monkeypatch.setattr(merge_arrays, "merge_orders", merge)
    monkeypatch.setattr(merge_arrays, "spark_session", lambda _: spark)
    # Other tests use the session too.
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    monkeypatch.setattr(merge_arrays, "REPETITIONS", 1)
    monkeypatch.setattr(merge_arrays, "_WARM_UP", 0)
    monkeypatch.setattr(workload, "run", partial(workload.run, changes=1_600))
    (result,) = merge_arrays.run()
    assert types == {False: "array<string>", True: "string"}
    assert result.name == "merge_arrays_typed_vs_text"
    assert result.ours > 0 and result.baseline is not None and result.baseline > 0
