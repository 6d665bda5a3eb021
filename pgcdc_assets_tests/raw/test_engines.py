"""Spark, delta-rs and DuckDB read the same values from the raw zone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.raw.test_stores import texts
from pgcdc_assets_tests.support.raw.epochs import EPOCH
from pgcdc_assets_tests.support.raw.rows import (
    COMMIT_TS,
    batch,
    change,
    relation,
    transaction,
    window,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Every kind of tuple: absent, without columns, with NULLs, with empty texts.
TUPLES: list[dict[str, Any]] = [
    {"new": None, "old": ["1", None], "old_kind": "K", "op": "D", "unchanged": None},
    {"new": [], "old": None, "old_kind": None, "op": "I", "unchanged": []},
    {"new": [None], "old": [None, ""], "old_kind": "O", "op": "U", "unchanged": [0, 2]},
    {"new": ["", None, "ü\n\t'\"\x01", "x" * 100_000], "old": [], "old_kind": "O", "op": "U"},
    {"new": ["prefix", "content"], "op": "M", "schema": None, "table": None, "relation_id": None},
    {"new": None, "op": "T", "origin": "elsewhere"},
]
COLUMNS = "ordinal op schema table origin old_kind old new unchanged commit_ts".split()


@pytest.fixture
def filled(zone: RawZone) -> RawZone:
    rows = [change(100, n, **values) for n, values in enumerate(TUPLES)]
    zone.changes.land(window(100, 200), [batch(*rows)])
    return zone


def expected() -> list[dict[str, Any]]:
    rows = [change(100, n, **values) | {"commit_ts": COMMIT_TS} for n, values in enumerate(TUPLES)]
    return [{name: row.get(name) for name in COLUMNS} for row in rows]


def test_delta_rs_reads_every_kind_of_tuple(filled: RawZone) -> None:
    found = DeltaTable(filled.changes.table.uri).to_pyarrow_dataset().to_table(columns=COLUMNS)
    assert found.sort_by("ordinal").to_pylist() == expected()


def test_duckdb_reads_every_kind_of_tuple(filled: RawZone) -> None:
    changes = DeltaTable(filled.changes.table.uri).to_pyarrow_dataset()
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.register("changes", changes)
        names = ", ".join(f'"{name}"' for name in COLUMNS)
        found = connection.sql(f"select {names} from changes order by ordinal").to_arrow_table()
    assert found.to_pylist() == expected()


def test_duckdb_reads_the_files_that_the_log_names(filled: RawZone) -> None:
    files = DeltaTable(filled.changes.table.uri).file_uris()
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        names = ", ".join(f'"{name}"' for name in COLUMNS)
        query = f"select {names} from read_parquet($files) order by ordinal"
        found = connection.sql(query, params={"files": files}).to_arrow_table()
    assert found.to_pylist() == expected()


@pytest.mark.spark
def test_spark_reads_every_kind_of_tuple(filled: RawZone, spark: SparkSession) -> None:
    frame = spark.read.format("delta").load(filled.changes.table.uri)
    rows = frame.selectExpr(
        *(f"`{name}`" for name in COLUMNS if name != "commit_ts"), "unix_micros(commit_ts) as us"
    ).orderBy("ordinal")
    found = [row.asDict() for row in rows.collect()]
    wanted = expected()
    for row in wanted:
        row["us"] = int(row.pop("commit_ts").timestamp() * 1_000_000)
    assert found == wanted


@pytest.mark.spark
def test_spark_reads_files_without_rows_and_partition_values(
    zone: RawZone, spark: SparkSession
) -> None:
    zone.snapshots.land_snapshot(1, Lsn(2**62), relation("full"), 2, [texts(["1", None], [""])])
    zone.snapshots.land_snapshot(1, Lsn(50), relation("with space/ö=%"), 1, [texts(["1"])])
    zone.snapshots.land_snapshot(1, Lsn(50), relation("empty"), 1, [])
    copies = spark.read.format("delta").load(zone.snapshots.table.uri)
    found = copies.where(f"table = 'full' and snapshot_lsn = {2**62}").select("new", "chunk")
    news = [row["new"] for row in found.collect()]
    assert sorted(news, key=str) == sorted([["1", None], [""]], key=str)
    assert copies.where("table = 'empty'").count() == 0
    assert copies.where("table = 'with space/ö=%'").count() == 1
    assert DeltaTable(zone.snapshots.table.uri).to_pyarrow_dataset().count_rows() == 3


@pytest.mark.spark
def test_spark_reads_relations_and_epochs(zone: RawZone, spark: SparkSession) -> None:
    zone.relations.register(1, relation("orders", 1), Lsn(10))
    zone.relations.flush()
    zone.epochs.append(EPOCH)
    (row,) = spark.read.format("delta").load(zone.relations.table.uri).collect()
    assert [column["name"] for column in row["columns"]] == ["id", "note"]
    assert row["primary_key"] == ["id"]
    (row,) = spark.read.format("delta").load(zone.epochs.table.uri).collect()
    assert (row["slot"], row["start_lsn"]) == ("pgcdc_test", 99)


@pytest.mark.spark
def test_spark_skips_the_files_of_other_windows(zone: RawZone, spark: SparkSession) -> None:
    for start in range(100, 600, 100):
        zone.changes.land(window(start, start + 100), [transaction(start, 3)])
    frame = spark.read.format("delta").load(zone.changes.table.uri)
    chosen = frame.where("epoch = 1 and commit_lsn >= 200 and commit_lsn < 400")
    assert len(chosen.inputFiles()) == 2
    assert chosen.count() == 6


def test_the_table_keeps_the_declared_nullability(zone: RawZone) -> None:
    """The nullability of columns and of list elements."""
    zone.changes.land(window(100, 200), [])
    stored = pa.schema(DeltaTable(zone.changes.table.uri).schema().to_arrow())
    for field in zone.changes.table.schema:
        found = stored.field(field.name)
        assert found.nullable == field.nullable
        if pa.types.is_list(field.type):
            assert found.type.value_field.nullable == field.type.value_field.nullable
