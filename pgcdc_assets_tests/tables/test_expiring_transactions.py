"""Tables whose owner lets application transactions expire: the log entries have the watermark."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TableDamaged
from pgcdc_assets.lsn import Position
from pgcdc_assets.merge import rebuild_table
from pgcdc_assets.raw.delta.log_entries import FOLDER, commit_path
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.properties import TRANSACTION_RETENTION
from pgcdc_assets.tables.spark_watermarks import renew_watermark
from pgcdc_assets.tables.state import (
    ScdState,
    advance_watermark,
    open_table,
    read_position,
    read_scd_state,
)
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark, merge_together

pytestmark = pytest.mark.spark

_ITEMS = CdcTable("shop", "items")
_DAY_MS = 86_400_000
_WAYS = pytest.mark.parametrize("choose", [merge_by_spark, merge_together])
_Choose = Callable[[pytest.MonkeyPatch], None]


def _merged(spark: SparkSession, zone: RawZone) -> tuple[Landing, Path]:
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    merge(spark, landing, _ITEMS)
    landing.land([insert("3", "c")])
    return landing, Path(merge(spark, landing, _ITEMS).path)


def _edit_transactions(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for entry in (path / FOLDER).glob("*.json"):
        actions = [json.loads(line) for line in entry.read_text().splitlines()]
        for action in actions:
            if "txn" in action:
                change(action["txn"])
        entry.write_text("\n".join(map(json.dumps, actions)) + "\n")
        entry.with_name(f".{entry.name}.crc").unlink(missing_ok=True)


def _make_older(path: Path, days: int) -> None:
    def make_older(transaction: dict[str, Any]) -> None:
        if transaction.get("lastUpdated") is not None:
            transaction["lastUpdated"] -= days * _DAY_MS

    _edit_transactions(path, make_older)
    for file in path.rglob("*"):
        at = file.stat().st_mtime - days * 86_400
        os.utime(file, (at, at))


def _limit(spark: SparkSession, path: Path) -> None:
    spark.sql(
        f"ALTER TABLE {delta_table(str(path))} "
        f"SET TBLPROPERTIES ('{TRANSACTION_RETENTION}' = 'interval 7 days')"
    )


def _write_checkpoint(spark: SparkSession, path: Path) -> None:
    for number in range(2):
        spark.sql(
            f"ALTER TABLE {delta_table(str(path))} "
            f"SET TBLPROPERTIES ('delta.checkpointInterval' = '2', 'mine' = '{number}')"
        )
    assert [*(path / FOLDER).glob("*.checkpoint*.parquet")]


def _position(zone: RawZone, path: Path) -> Position | None:
    table = open_table(zone.lake, str(path))
    assert table is not None
    return read_position(zone, table, str(path))


def _state(zone: RawZone, path: Path) -> ScdState:
    state = read_scd_state(zone.lake, zone.name, str(path))
    assert state is not None
    return state


def _check_merge(spark: SparkSession, landing: Landing, path: Path) -> None:
    """Merge another row. A merge without a watermark or fence would add rows twice, or fail."""
    fence = _state(landing.zone, path).fence
    landing.land([insert("4", "d")])
    merge(spark, landing, _ITEMS)
    ids = [r["id"] for r in spark.read.format("delta").load(str(path)).select("id").collect()]
    assert sorted(ids) == [1, 2, 3, 4]
    state = _state(landing.zone, path)
    assert (state.fence, state.watermark) == (fence + 1, landing.windows[-1].end_position)


@pytest.mark.sampled
@_WAYS
def test_expired_transactions_are_read_from_the_log(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, choose: _Choose
) -> None:
    choose(monkeypatch)
    landing, path = _merged(spark, zone)
    mark, fence = landing.windows[-1].end_position, _state(zone, path).fence
    _make_older(path, 8)
    _limit(spark, path)
    assert _position(zone, path) == mark
    assert _state(zone, path).fence == fence
    _check_merge(spark, landing, path)
    state = _state(zone, path)
    assert state.is_watermark_recorded


@_WAYS
@pytest.mark.sampled
@pytest.mark.parametrize("is_unset", [False, True])
def test_transactions_that_spark_dropped_are_read_from_the_log(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    choose: _Choose,
    is_unset: bool,
) -> None:
    """Spark takes a transaction without a time, as of earlier releases, for an expired one."""
    choose(monkeypatch)
    landing, path = _merged(spark, zone)
    mark = landing.windows[-1].end_position
    _edit_transactions(path, lambda transaction: transaction.pop("lastUpdated", None))
    _limit(spark, path)
    _write_checkpoint(spark, path)
    if is_unset:
        spark.sql(
            f"ALTER TABLE {delta_table(str(path))} UNSET TBLPROPERTIES ('{TRANSACTION_RETENTION}')"
        )
    assert _position(zone, path) == mark
    _check_merge(spark, landing, path)


@pytest.mark.sampled
def test_maintenance_renews_transactions_before_they_expire(
    spark: SparkSession, zone: RawZone
) -> None:
    landing, path = _merged(spark, zone)
    mark = landing.windows[-1].end_position
    _limit(spark, path)

    def no_spark() -> NoReturn:
        raise AssertionError("Spark was asked for")

    for _ in range(2):
        _make_older(path, 5)
        assert renew_watermark(no_spark, zone, _state(zone, path))
    assert not renew_watermark(no_spark, zone, _state(zone, path))
    _write_checkpoint(spark, path)
    for entry in (path / FOLDER).glob("*.json"):
        if int(entry.stem) < DeltaTable(str(path)).version():
            entry.unlink()
            entry.with_name(f".{entry.name}.crc").unlink(missing_ok=True)
    state = _state(zone, path)
    assert (state.watermark, state.is_watermark_recorded) == (mark, True)
    _check_merge(spark, landing, path)


def test_a_watermark_that_moved_without_changes_is_read_from_the_log(
    spark: SparkSession, zone: RawZone
) -> None:
    landing, path = _merged(spark, zone)
    before = landing.windows[-1].end_position
    after = landing.land([]).end_position
    advance_watermark(zone, str(path), before, after)
    _make_older(path, 8)
    _limit(spark, path)
    assert _position(zone, path) == after
    # Earlier releases wrote no metadata in such a commit.
    entry = max(p for p in (path / FOLDER).glob("*.json") if '"txn"' in p.read_text())
    lines = entry.read_text().splitlines()
    entry.write_text("\n".join(line for line in lines if "commitInfo" not in line) + "\n")
    assert _position(zone, path) == after
    _check_merge(spark, landing, path)


@pytest.mark.sampled
def test_a_lost_watermark_is_an_error_and_a_rebuild_corrects_it(
    spark: SparkSession, zone: RawZone
) -> None:
    """A merge that begins again would write rows twice."""
    landing, path = _merged(spark, zone)
    _make_older(path, 8)
    _limit(spark, path)
    _write_checkpoint(spark, path)
    table = DeltaTable(str(path))
    for version in range(table.version()):
        (path / commit_path(version)).unlink(missing_ok=True)
    with pytest.raises(TableDamaged, match="has lost the commit with the newest watermark"):
        _state(zone, path)
    assert rebuild_table(spark, zone, _ITEMS, 1).row_count == 3
    _check_merge(spark, landing, path)
