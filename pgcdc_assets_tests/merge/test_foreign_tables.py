"""A Delta table of another program in the folder of an SCD table."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError, MergeConflict
from pgcdc_assets.merge import MergeFailure, merge_tables, rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation
from pgcdc_assets_tests.support.merge.one_table import merge

pytestmark = pytest.mark.spark

_OF_OTHERS = pa.table({"id": pa.array([7], pa.int32()), "v": ["theirs"]})


def _landing(zone: RawZone) -> Landing:
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([insert("2", "b")])
    return landing


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
def test_neither_a_merge_nor_a_rebuild_replaces_a_table_of_another_program(
    spark: SparkSession, zone: RawZone, scd: int
) -> None:
    landing, target = _landing(zone), CdcTable("shop", "items", (scd,))
    path = table_path(zone.lake, zone.name, "shop", "items", scd)
    write_deltalake(path, _OF_OTHERS)
    (failure,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, MergeConflict), failure.error
    assert path in str(failure.error) and "another folder" in str(failure.error)
    with pytest.raises(ConfigurationError, match="was not made by this package"):
        rebuild_table(spark, zone, target, scd)
    assert DeltaTable(path).version() == 0
    assert DeltaTable(path).to_pyarrow_table().to_pylist() == _OF_OTHERS.to_pylist()


@pytest.mark.sampled
def test_a_table_without_rows_that_an_owner_has_created_is_merged(
    spark: SparkSession, zone: RawZone
) -> None:
    """Such as one with properties of the owner."""
    landing, target = _landing(zone), CdcTable("shop", "items")
    path = table_path(zone.lake, zone.name, "shop", "items", 1)
    write_deltalake(path, _OF_OTHERS.slice(0, 0))
    assert merge(spark, landing, target).row_count == 2
