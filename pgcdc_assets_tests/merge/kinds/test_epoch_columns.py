"""A history of two epochs. The second epoch begins at a lower LSN."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.kinds.epoch_columns import MergedEpoch, epoch_sql
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.columns import EPOCH_COLUMNS
from pgcdc_assets_tests.support.merge.history import (
    CLOCK,
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import drop_epochs, merge
from pgcdc_assets_tests.support.verify.merged_tables import HISTORY

_GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "read-tables.md"

# The rows of the source after each commit, by epoch and LSN.
_STATES = {
    (1, 0x5000): {1: "b", 2: "a"},
    (1, 0x5010): {1: "b", 2: "a", 3: "a"},
    (2, 0x4FF0): {1: "c", 2: "a", 4: "a"},
    (2, 0x5000): {1: "d", 2: "a", 4: "a"},
    (2, 0x5010): {1: "d", 4: "a"},
    (2, 0x5020): {},
    (2, 0x5030): {5: "a"},
}


def _states(spark: SparkSession, path: str) -> dict[tuple[int, int], dict[int, str]]:
    """Run the guide's query for each position on the rows of the table."""
    (query,) = re.findall(r"```sql\n(select \* from history\n.*?)```", _GUIDE.read_text(), re.S)
    table = spark.read.format("delta").load(path)
    spark.createDataFrame(table.collect(), table.schema).createOrReplaceTempView("history")
    found = {}
    for epoch, lsn in _STATES:
        at = query.replace(":epoch", str(epoch)).replace(":lsn", str(lsn))
        rows = spark.sql(at).collect()
        found[epoch, lsn] = {row["id"]: row["v"] for row in rows}
        assert len(found[epoch, lsn]) == len(rows)
    return found


def _first_epoch(spark: SparkSession, zone: RawZone) -> tuple[Landing, str]:
    landing = Landing(zone, [relation(column("id"), column("v", "text"))], lsn=0x5000)
    landing.begin([("1", "a"), ("2", "a")])
    landing.land([update("1", "b")], [insert("3", "a")])
    return landing, merge(spark, landing, HISTORY).path


def _second_epoch(spark: SparkSession, landing: Landing) -> None:
    landing.epoch, landing.lsn, landing.clock = 2, 0x4FF0, CLOCK + dt.timedelta(days=1)
    landing.begin([("1", "c"), ("2", "a")])
    landing.land([insert("4", "a")], [update("1", "d")], [delete("2", None)])
    merge(spark, landing, HISTORY)


def _empty_and_refill(spark: SparkSession, landing: Landing) -> None:
    landing.land([truncate()])
    landing.land([insert("5", "a")])
    merge(spark, landing, HISTORY)


@pytest.mark.sampled
@pytest.mark.spark
def test_the_documented_query_returns_the_state_at_each_position(
    spark: SparkSession, zone: RawZone
) -> None:
    landing, path = _first_epoch(spark, zone)
    _second_epoch(spark, landing)
    _empty_and_refill(spark, landing)
    assert _states(spark, path) == _STATES


@pytest.mark.sampled
@pytest.mark.spark
@pytest.mark.parametrize("merged_epochs", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_next_merge_adds_epochs_to_a_history_of_an_earlier_release(
    spark: SparkSession, zone: RawZone, merged_epochs: int
) -> None:
    landing, path = _first_epoch(spark, zone)
    if merged_epochs == 1:
        drop_epochs(spark, path)
        _second_epoch(spark, landing)
    else:
        _second_epoch(spark, landing)
        drop_epochs(spark, path)
    _empty_and_refill(spark, landing)
    assert _states(spark, path) == _STATES
    table = spark.read.format("delta").load(path)
    assert table.where("_valid_from_epoch IS NULL").count() == 0
    assert all(table.schema[name].metadata.get("comment") for name in EPOCH_COLUMNS)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("lsn", "at", "epoch"), [(5, 0, 2), (30, 0, 1), (30, 9, 2), (70, 9, 1), (99, 9, None)]
)
def test_the_lsn_or_the_time_identifies_the_epoch(
    spark: SparkSession, lsn: int, at: int, epoch: int | None
) -> None:
    start = dt.datetime.fromtimestamp(5e-6, dt.UTC)
    merged = [MergedEpoch(2, Lsn(1), Lsn(50), start), MergedEpoch(1, Lsn(20), Lsn(80), start)]
    (row,) = spark.sql(
        f"SELECT {epoch_sql(merged, 'lsn', 'ts')} AS epoch "
        f"FROM (SELECT {lsn}L AS lsn, timestamp_micros({at}) AS ts)"
    ).collect()
    assert row["epoch"] == epoch
