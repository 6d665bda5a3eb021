"""Merges of tables whose changes or snapshot are in a lost file of the raw zone."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.errors import RawZoneError, SnapshotNeeded
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Landing, insert
from pgcdc_assets_tests.support.merge.one_table import merge

pytestmark = pytest.mark.spark

_ITEMS = CdcTable("shop", "items", scd=(1, 2))
_OTHER = CdcTable("shop", "other")


@pytest.fixture
def landing(zone: RawZone) -> Landing:
    return Landing.of_two_tables(zone)


def _newest_file(uri: str) -> Path:
    return Path(DeltaTable(uri).file_uris()[0])


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_lost_file_of_changes_stops_the_tables_with_changes_alone(
    spark: SparkSession, landing: Landing, damage: str
) -> None:
    """A new snapshot replaces the changes; of a history, it has their results."""
    zone = landing.zone
    first = list(merge_tables(spark, zone, [_ITEMS, _OTHER], landing.windows[-1]))
    assert all(isinstance(each, MergeReport) for each in first)
    landing.land([insert("2", "b")])
    file = _newest_file(zone.changes.table.uri)
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:50])
    found = list(merge_tables(spark, zone, [_ITEMS, _OTHER], landing.windows[-1]))
    failures = [each for each in found if isinstance(each, MergeFailure)]
    assert [(type(each.error), each.table) for each in failures] == [(RawZoneError, "items")] * 2
    assert f"raw/changes: a file of its log is {damage}. Restore" in str(failures[0].error)
    assert "pgcdc resnapshot test shop.items" in str(failures[0].error)
    assert [each.table for each in found if isinstance(each, MergeReport)] == ["other"]
    landing.copy([["1", "a"], ["2", "b"]])
    landing.land([insert("3", "c")])
    for report in merge_tables(spark, zone, [_ITEMS], landing.windows[-1]):
        assert isinstance(report, MergeReport), report.error
        assert report.row_count == 3


@pytest.mark.sampled
def test_a_lost_file_of_a_snapshot_needs_a_new_snapshot(
    spark: SparkSession, landing: Landing
) -> None:
    zone, table = landing.zone, CdcTable("shop", "items")
    files = DeltaTable(zone.snapshots.table.uri).file_uris()
    for file in files:
        Path(file).unlink()
    (failure,) = merge_tables(spark, zone, [table], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, SnapshotNeeded), failure.error
    landing.copy([["1", "a"]])
    landing.land([])
    assert merge(spark, landing, table).row_count == 1


@pytest.mark.sampled
@pytest.mark.parametrize("is_merged", [False, True])
def test_a_lost_relation_version_is_an_error_with_its_remedy(
    spark: SparkSession, landing: Landing, is_merged: bool
) -> None:
    zone, table = landing.zone, CdcTable("shop", "items")
    if is_merged:
        merge(spark, landing, table)
        landing.land([insert("2", "b")])
    DeltaTable(zone.relations.table.uri).delete()
    (failure,) = merge_tables(spark, zone, [table], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, RawZoneError), failure.error
    assert "version 1 of shop.items is not described. Restore" in str(failure.error)
    assert "pgcdc renew --name test" in str(failure.error)
