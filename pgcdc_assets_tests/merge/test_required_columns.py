"""Columns of SCD tables that another tool has made NOT NULL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType
from pyspark.sql import SparkSession

from pgcdc_assets.errors import MergeConflict
from pgcdc_assets.merge import MergeFailure, merge_tables
from pgcdc_assets.raw.delta.log_entries import commit_path
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

pytestmark = pytest.mark.spark


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
def test_a_required_column_of_another_tool_is_named_with_the_remedy(
    spark: SparkSession, zone: RawZone, scd: int
) -> None:
    target = CdcTable("shop", "items", (scd,))
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([])
    path = merge(spark, landing, target).path
    required = Field("extra", PrimitiveType("string"), nullable=False)
    DeltaTable(path).alter.add_columns(required)
    landing.land([insert("2", "secret value"), update("1", "A")])
    (failure,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, MergeConflict), failure.error
    text = str(failure.error)
    remedy = f"ALTER TABLE {delta_table(path)} ALTER COLUMN `extra` DROP NOT NULL"
    assert '"extra"' in text
    assert remedy in text
    assert "secret" not in text
    spark.sql(remedy)
    merge(spark, landing, target)
    rows = spark.read.format("delta").load(path)
    current = rows.where("_is_current") if scd == 2 else rows
    found = current.select("id", "v", "extra").collect()
    assert sorted(map(tuple, found)) == [(1, "A", None), (2, "secret value", None)]


def test_a_null_in_a_required_column_is_named_with_the_remedy(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source accepts NULL, and its table has the column too."""
    merge_by_spark(monkeypatch)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([])
    path = Path(merge(spark, landing, CdcTable("shop", "items")).path)
    # Another tool has replaced the schema, as Databricks does for SET NOT NULL.
    entry = path / commit_path(0)
    before, after = (
        json.dumps(json.dumps({"name": "v", "type": "string", "nullable": nullable}))[2:-3]
        for nullable in (True, False)
    )
    before, after = (text.replace(": ", ":").replace(", ", ",") for text in (before, after))
    text = entry.read_text()
    assert before in text
    entry.write_text(text.replace(before, after))
    entry.with_name(f".{entry.name}.crc").unlink(missing_ok=True)
    for checksum in entry.parent.glob("*.crc"):
        checksum.unlink()
    landing.land([insert("2", None)])
    (failure,) = merge_tables(spark, zone, [CdcTable("shop", "items")], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, MergeConflict), failure.error
    assert f"ALTER TABLE {delta_table(str(path))} ALTER COLUMN `v` DROP NOT NULL" in str(
        failure.error
    )
