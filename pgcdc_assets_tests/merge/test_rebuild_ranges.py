"""Rebuilds of tables whose raw zone is older, or has epochs without the table."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import read_watermark
from pgcdc_assets_tests.support.merge.current_values import current_values
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.raw.epochs import EPOCH

pytestmark = pytest.mark.spark

_ITEMS = relation(column("id"), column("v", "text"))


def _begun(zone: RawZone) -> Landing:
    landing = Landing(zone, [_ITEMS])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([update("1", "A")])
    return landing


def _renew(landing: Landing, epoch: int) -> None:
    """Begin an epoch without a snapshot of the table."""
    landing.epoch, landing.lsn = epoch, landing.lsn + 0x100
    landing.zone.epochs.append(
        replace(EPOCH, epoch=epoch, start_lsn=Lsn(landing.lsn), created_at=landing.clock)
    )


def _raw(zone: RawZone) -> Path:
    return Path(zone.changes.table.uri).parent


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
def test_a_rebuild_from_an_older_raw_zone_is_refused(
    spark: SparkSession, zone: RawZone, tmp_path: Path, scd: int
) -> None:
    """The raw zone was restored from an older copy."""
    target = CdcTable("shop", "items", (scd,))
    landing = _begun(zone)
    older = shutil.copytree(_raw(zone), tmp_path / "older")
    captured = landing.windows[-1].end
    landing.land([insert("3", "c")])
    path = merge(spark, landing, target).path
    mark = read_watermark(zone.lake, zone.name, "shop", "items", scd)
    shutil.rmtree(_raw(zone))
    shutil.copytree(older, _raw(zone))
    restored = RawZone(zone.lake, zone.name)
    with pytest.raises(
        ConfigurationError, match=f"{landing.windows[-1].end}.*--through {captured}"
    ):
        rebuild_table(spark, restored, target, scd)
    assert current_values(spark, path) == [(1, "A"), (2, "b"), (3, "c")]
    assert read_watermark(zone.lake, zone.name, "shop", "items", scd) == mark
    rebuild_table(spark, restored, target, scd, captured)
    assert current_values(spark, path) == [(1, "A"), (2, "b")]


@pytest.mark.sampled
def test_a_rebuild_from_a_raw_zone_without_the_epoch_of_the_table_is_refused(
    spark: SparkSession, zone: RawZone, tmp_path: Path
) -> None:
    """A later epoch of the same number would seem to be merged up to the old watermark."""
    target = CdcTable("shop", "items")
    landing = _begun(zone)
    merge(spark, landing, target)
    older = shutil.copytree(_raw(zone), tmp_path / "older")
    captured = landing.windows[-1].end
    landing.epoch = 2
    landing.begin([["1", "second"]])
    landing.land([insert("3", "c")])
    path = merge(spark, landing, target).path
    shutil.rmtree(_raw(zone))
    shutil.copytree(older, _raw(zone))
    restored = RawZone(zone.lake, zone.name)
    for through in (None, captured):
        with pytest.raises(ConfigurationError, match=r"epoch 2.*epoch 1.*to another folder"):
            rebuild_table(spark, restored, target, 1, through)
    assert current_values(spark, path) == [(1, "second"), (3, "c")]


@pytest.mark.sampled
def test_a_snapshot_ahead_of_the_capture_does_not_refuse_a_rebuild(
    spark: SparkSession, zone: RawZone
) -> None:
    """The next merge applies the snapshot again."""
    target = CdcTable("shop", "items")
    landing = _begun(zone)
    landing.copy([["1", "new"]], at=landing.lsn + 0x100)
    path = merge(spark, landing, target).path
    assert current_values(spark, path) == [(1, "new")]
    rebuild_table(spark, zone, target, 1)
    assert current_values(spark, path) == [(1, "A"), (2, "b")]
    merge(spark, landing, target)
    assert current_values(spark, path) == [(1, "new")]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "target",
    [
        CdcTable("shop", "items"),
        CdcTable("shop", "items", (2,)),
        CdcTable("shop", "items", soft_deletes=True),
    ],
    ids=["scd1", "scd2", "soft deletes"],
)
@pytest.mark.parametrize("damages_log", [False, True], ids=["a file", "the log"])
def test_a_damaged_table_that_left_before_an_epoch_is_rebuilt(
    spark: SparkSession, zone: RawZone, target: CdcTable, damages_log: bool
) -> None:
    """No later epoch will have a snapshot of the table, so `pgcdc resnapshot` is no remedy."""
    (scd,) = target.scd
    landing = _begun(zone)
    path = Path(merge(spark, landing, target).path)
    landing.land([insert("3", "c")])
    last = landing.windows[-1].end
    for epoch in (2, 3):
        _renew(landing, epoch)
        landing.land([])
    if damages_log:
        entry = max(Path(path, "_delta_log").glob("*.json"))
        entry.write_text(entry.read_text()[:40])
    else:
        for file in path.glob("**/*.parquet"):
            file.unlink()
    report = rebuild_table(spark, zone, target, scd)
    assert (report.epoch, report.watermark_after) == (1, last)
    assert current_values(spark, str(path)) == [(1, "A"), (2, "b"), (3, "c")]
    assert read_watermark(zone.lake, zone.name, "shop", "items", scd) == (1, last)
    rebuild_table(spark, zone, target, scd, landing.windows[0].end)
    assert current_values(spark, str(path)) == [(1, "A"), (2, "b")]
