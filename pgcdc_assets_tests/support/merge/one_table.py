"""Merges of one table, also while another merge overtakes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.columns import EPOCH_COLUMNS
from pgcdc_assets_tests.support.merge.history import Landing


def merge(
    spark: SparkSession, landing: Landing, target: CdcTable, through: LsnWindow | None = None
) -> MergeReport:
    """Merge a table through a window, the newest by default, and check the success."""
    (report,) = merge_tables(spark, landing.zone, [target], through or landing.windows[-1])
    assert isinstance(report, MergeReport), report.error.__cause__ or report.error
    return report


def overtake(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, merge: Callable[[], MergeReport]
) -> None:
    """Run another merge once, directly after the return of a function of the next merge."""
    real, overtaking = getattr(module, name), [merge]

    def overtaken(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        if overtaking:
            overtaking.pop()()
        return found

    monkeypatch.setattr(module, name, overtaken)


def assert_overtaken(spark: SparkSession, landing: Landing, target: CdcTable) -> None:
    """Check that the next merge reports a faster merge."""
    (failure,) = merge_tables(spark, landing.zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TransientError), failure.error
    assert "Another process merged the Delta table" in str(failure.error)


def log_of(path: str) -> list[dict[str, Any]]:
    """Return the commits of Spark, newest first, without commits of a watermark only."""
    return [e for e in DeltaTable(path).history() if e["engineInfo"].startswith("Apache-Spark")]


def merge_beside_column_of_owner(
    spark: SparkSession, landing: Landing, target: CdcTable, land: Callable[[Landing], object]
) -> str:
    """Merge changes into a table with a column of its owner; return the path.

    The column `extra` has the value `mine` in each row before the changes.
    """
    path = merge(spark, landing, target).path
    spark.sql(f"ALTER TABLE {delta_table(path)} ADD COLUMNS (extra STRING)")
    spark.sql(f"UPDATE {delta_table(path)} SET extra = 'mine'")
    land(landing)
    merge(spark, landing, target)
    return path


def merge_with_change_data(
    spark: SparkSession, landing: Landing, target: CdcTable, land: Callable[[Landing], object]
) -> int:
    """Merge changes into a table with a change data feed; count the rows of the change data."""
    path = merge(spark, landing, target).path
    spark.sql(
        f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES (delta.enableChangeDataFeed = true)"
    )
    land(landing)
    merge(spark, landing, target)
    version = log_of(path)[0]["version"]
    changed = spark.read.option("readChangeFeed", "true").option("startingVersion", version)
    return changed.format("delta").load(path).count()


def drop_epochs(spark: SparkSession, path: str) -> None:
    """Remove the epoch columns of a history, as in tables of early releases."""
    rows = spark.read.format("delta").load(path).drop(*EPOCH_COLUMNS)
    writer = rows.write.format("delta").mode("overwrite").partitionBy("_is_current")
    writer.option("overwriteSchema", "true").save(path)
