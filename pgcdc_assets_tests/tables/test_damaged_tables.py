"""SCD tables with missing or truncated files: each fails alone, and a rebuild corrects it."""

from __future__ import annotations

import datetime as dt
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TableDamaged
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables, rebuild_table
from pgcdc_assets.orchestration.jobs.maintenance import lowest_position
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw.retention import remove_windows
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.state import read_scd_state, read_watermark, table_path
from pgcdc_assets.verify.table_version import read_table_version
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge

pytestmark = pytest.mark.spark

_ITEMS, _OTHER = CdcTable("shop", "items"), CdcTable("shop", "other")
_COLUMNS = column("id"), column("v", "text")


def _log(path: Path) -> Path:
    return path / "_delta_log"


def _newest_entry(path: Path) -> Path:
    return max(_log(path).glob("*.json"))


def _lose_deletion_vectors(path: Path) -> None:
    for file in path.glob("**/*.bin"):
        file.unlink()


def _cut_off_newest_entry(path: Path) -> None:
    text = _newest_entry(path).read_text()
    _newest_entry(path).write_text(text[: len(text) // 2])


def _lose_checkpoint(path: Path) -> None:
    DeltaTable(str(path)).create_checkpoint()
    for file in [*_log(path).glob("*.checkpoint.parquet"), _log(path) / f"{0:020d}.json"]:
        file.unlink()


def _lose_log(path: Path) -> None:
    shutil.rmtree(_log(path))
    _log(path).mkdir()


_DAMAGES = {
    "deletion vector": _lose_deletion_vectors,
    "log entry": _cut_off_newest_entry,
    "checkpoint": _lose_checkpoint,
}


@pytest.fixture
def landing(spark: SparkSession, zone: RawZone) -> Landing:
    """Merge two tables, the first with a deletion vector, and land a change of each table."""
    described = relation(*_COLUMNS)
    other = relation(*_COLUMNS, table="other", relation_id=1001)
    landing = Landing(zone, [described, other])
    landing.begin([["1", "a"], ["2", "b"], ["3", "c"]])
    landing.land([])
    for report in merge_tables(spark, zone, [_ITEMS, _OTHER], landing.windows[-1]):
        assert isinstance(report, MergeReport), report.error
    spark.sql(f"DELETE FROM {delta_table(str(_path(zone)))} WHERE id = 2")
    assert [*_path(zone).glob("**/*.bin")]
    landing.land([update("1", "A"), insert("9", "z", relation_id=1001)])
    return landing


def _path(zone: RawZone) -> Path:
    return Path(table_path(zone.lake, zone.name, "shop", "items", 1))


@pytest.mark.sampled
@pytest.mark.parametrize("damage", _DAMAGES.values(), ids=_DAMAGES)
def test_a_damaged_table_fails_alone_and_a_rebuild_corrects_it(
    spark: SparkSession, landing: Landing, damage: Callable[[Path], None]
) -> None:
    """H8: the other table is merged, and the error names the table and the remedy."""
    zone, path = landing.zone, _path(landing.zone)
    damage(path)
    results = {r.table: r for r in merge_tables(spark, zone, [_ITEMS, _OTHER], landing.windows[-1])}
    failure, report = results["items"], results["other"]
    assert isinstance(report, MergeReport)
    assert report.row_count == 1
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TableDamaged), failure.error
    assert str(path) in str(failure.error)
    assert "pgcdc rebuild" in str(failure.error)
    with pytest.raises(TableDamaged):
        read_table_version(zone, str(path), "shop.items", zone.epochs.all())
    rebuild_table(spark, zone, _ITEMS, 1)
    assert read_watermark(zone.lake, zone.name, "shop", "items", 1) == (1, landing.windows[-1].end)
    rows = spark.read.format("delta").load(str(path)).select("id", "v").collect()
    assert sorted(map(tuple, rows)) == [(1, "A"), (2, "b"), (3, "c")]
    landing.land([insert("4", "d")])
    assert merge(spark, landing, _ITEMS).row_count == 4


@pytest.mark.sampled
def test_a_damaged_table_stops_neither_sensor_nor_retention(landing: Landing) -> None:
    """The sensor reads the other tables, and retention keeps all windows of the damaged table."""
    zone = landing.zone
    _cut_off_newest_entry(_path(zone))
    tables = [CdcTable("shop", "items"), CdcTable("shop", "other")]
    capture = CdcCapture(name=zone.name, publication="pub", tables=tuple(tables))
    items, other = read_state(zone, capture).tables
    assert (items.is_broken, items.needs_merge) == (True, True)
    assert (other.is_broken, other.waiting_changes) == (False, 1)
    assert lowest_position(zone, capture) is None


@pytest.mark.sampled
@pytest.mark.parametrize("folder", ["_delta_log", "partition"])
def test_a_table_without_a_log_is_rebuilt_and_reported(
    spark: SparkSession, landing: Landing, folder: str
) -> None:
    """A process that is killed during the creation of a table leaves such a folder."""
    path = _path(landing.zone)
    path.rename(path.with_name("away"))
    (path / folder).mkdir(parents=True)
    (path / "file.parquet").write_text("no Parquet")
    assert read_scd_state(landing.zone.lake, landing.zone.name, str(path)) is None
    report = merge(spark, landing, _ITEMS)
    assert (report.row_count, report.is_remade) == (3, True)
    assert not merge(spark, landing, _OTHER).is_remade


@pytest.mark.sampled
def test_a_history_without_a_log_is_not_rebuilt_after_retention(
    spark: SparkSession, landing: Landing
) -> None:
    """The raw zone lacks its first changes, so a table from a later snapshot would differ."""
    zone, target = landing.zone, CdcTable("shop", "items", (2,))
    landing.land([update("1", "B")])
    merge(spark, landing, target)
    landing.copy([("1", "B"), ("3", "c")])
    landing.land([insert("7", "g")])
    merge(spark, landing, target)
    path = Path(table_path(zone.lake, zone.name, "shop", "items", 2))
    _lose_log(path)
    through = landing.windows[-1]
    (report,) = merge_tables(spark, zone, [target], through)
    assert isinstance(report, MergeReport) and report.is_remade
    _lose_log(path)
    remove_windows(zone, 1, landing.windows[1].end, landing.clock + dt.timedelta(days=1))
    (failure,) = merge_tables(spark, zone, [target], through)
    assert isinstance(failure, MergeFailure)
    assert str(path) in str(failure.error)
    assert "no Delta log" in str(failure.error)
    path.rename(path.with_name("away"))
    assert not merge(spark, landing, target).is_remade


def _killed_before_first_commit(spark: SparkSession, landing: Landing, target: CdcTable) -> Path:
    """Leave the data files of a table that began when retention had removed the first changes."""
    zone = landing.zone
    landing.copy([("1", "A"), ("2", "b"), ("3", "c")])
    landing.land([update("1", "B")])
    path = Path(table_path(zone.lake, zone.name, "shop", "items", target.scd[0]))
    remove_windows(zone, 1, landing.windows[1].end, landing.clock + dt.timedelta(days=1))
    merge(spark, landing, target)
    _lose_log(path)
    return path


@pytest.mark.sampled
@pytest.mark.parametrize(
    "target",
    [CdcTable("shop", "items", (2,)), CdcTable("shop", "items", (1,), soft_deletes=True)],
    ids=["scd2", "soft deletes"],
)
@pytest.mark.parametrize("has_folder", [True, False])
def test_a_history_that_was_never_committed_is_created_after_retention(
    spark: SparkSession, landing: Landing, target: CdcTable, has_folder: bool
) -> None:
    """A process was killed between the data files and the first commit of the table."""
    shutil.rmtree(_path(landing.zone))
    path = _killed_before_first_commit(spark, landing, target)
    if not has_folder:
        _log(path).rmdir()
    # The process was killed within a file too.
    (path / "part-cut.parquet").write_bytes(b"PAR1")
    (report,) = merge_tables(spark, landing.zone, [target], landing.windows[-1])
    assert isinstance(report, MergeReport), report.error
    assert report.is_remade
    rows = spark.read.format("delta").load(str(path))
    current = rows.where("_is_current") if target.scd == (2,) else rows
    assert sorted(map(tuple, current.select("id", "v").collect())) == [(1, "B"), (2, "b"), (3, "c")]


@pytest.mark.sampled
def test_soft_deletes_without_a_log_are_not_rebuilt_after_retention(
    spark: SparkSession, landing: Landing
) -> None:
    """A row that was deleted before the retained snapshot would be lost."""
    shutil.rmtree(_path(landing.zone))
    target = CdcTable("shop", "items", (1,), soft_deletes=True)
    landing.land([delete("2", None)])
    landing.copy([("1", "A"), ("3", "c")])
    landing.land([update("1", "B")])
    merge(spark, landing, target)
    remove_windows(landing.zone, 1, landing.windows[-2].end, landing.clock + dt.timedelta(days=1))
    _lose_log(_path(landing.zone))
    (failure,) = merge_tables(spark, landing.zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert "no Delta log" in str(failure.error)


@pytest.mark.sampled
def test_a_history_that_is_a_clone_is_not_merged_again(
    spark: SparkSession, landing: Landing
) -> None:
    """A clone has no application transactions: all versions would begin and end once more."""
    zone, target = landing.zone, CdcTable("shop", "items", (2,))
    path = Path(merge(spark, landing, target).path)
    away = path.rename(path.with_name("away"))
    spark.sql(f"CREATE TABLE {delta_table(str(path))} SHALLOW CLONE {delta_table(str(away))}")
    landing.land([update("1", "B")])
    (failure,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TableDamaged), failure.error
    rebuild_table(spark, zone, target, 2)
    landing.land([insert("4", "d")])
    merge(spark, landing, target)
    rows = spark.read.format("delta").load(str(path)).select("id", "v", "_is_current").collect()
    ended = [(1, "A", False), (1, "a", False)]
    current = [(1, "B", True), (2, "b", True), (3, "c", True), (4, "d", True)]
    assert sorted(map(tuple, rows)) == sorted([*ended, *current])
