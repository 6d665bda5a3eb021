"""Entries of SCD tables in a catalog of Spark: names, creation, and entries of other tables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.settings.catalog import CatalogPolicy
from pgcdc_assets.spark.catalog import (
    CatalogTable,
    check_catalog,
    entry_name,
    qualified_entry_name,
    register_tables,
)
from pgcdc_assets.spark.server_process import RunningServer
from pgcdc_assets.spark.session import release_session
from pgcdc_assets.table_name import TableName

HOSTILE = (
    ("shop", "orders"),
    ("shop", "Orders"),
    ("shop", "ORDERS"),
    ("shop", "or.ders"),
    ("shop", "or ders"),
    ("shop", "or_ders"),
    ("shop", "or__ders"),
    ("shop__or", "ders"),
    ("shop_", "orders"),
    ("shop", "_orders"),
    ("shop", "o\"r`d'ers"),
    ("shop", "😀"),
    ("shop", "😁"),
    ("shop", "straße"),
    ("shop", "strasse"),
    ("İ", "i"),
    ("i", "İ"),
    ("shop", "x" * 63),
    ("shop", "x" * 62 + "y"),
    ("y" * 63, "x" * 63),
    ("shop", "../.."),
    ("shop", "%*|"),
)


def test_names_of_entries_are_plain_and_differ_for_any_two_tables() -> None:
    names = [entry_name(TableName(*each), scd) for each in HOSTILE for scd in (1, 2)]
    assert len(set(names)) == 2 * len(HOSTILE)
    for name in names:
        assert name == name.lower()
        assert name.isascii() and name.replace("_", "").isalnum()
        assert len(name) <= 128
    assert entry_name(TableName("shop", "order_items"), 2) == "shop__order_items__scd2"
    assert entry_name(TableName("shop", "Order Lines"), 1).startswith("shop__order_lines_")


def test_settings_of_a_catalog_are_checked() -> None:
    assert CatalogPolicy("cdc").name == "spark_catalog"
    for wrong, setting in (
        ({"schema": "Cdc"}, "catalog.schema"),
        ({"schema": "a.b"}, "catalog.schema"),
        ({"schema": "cdc", "type": "glue"}, "catalog.type"),
        ({"schema": "cdc", "type": "hive", "name": "other"}, "catalog.name"),
        ({"schema": "cdc", "type": "unity"}, "catalog.name"),
        ({"schema": "cdc", "type": "unity", "name": "a`b"}, "catalog.name"),
    ):
        with pytest.raises(ConfigurationError, match=setting):
            CatalogPolicy(**wrong)


@pytest.mark.sampled
@pytest.mark.spark
def test_tables_are_found_by_name_and_entries_of_other_tables_stay(
    spark: SparkSession, tmp_path: Path
) -> None:
    policy = CatalogPolicy(f"cdc_{tmp_path.name}".lower())
    names = [TableName(*HOSTILE[0]), TableName(*HOSTILE[1]), TableName("shop", "it's 100% 😀")]
    tables = [CatalogTable(name, 1, str(tmp_path / "la ke" / name.table)) for name in names]
    for number, each in enumerate(tables):
        write_deltalake(each.path, pa.table({"id": [number]}))
    schema = f"{policy.name}.{policy.schema}"
    try:
        found = dict(register_tables(spark, policy, tables))
        assert found == dict.fromkeys(tables)
        hostile = qualified_entry_name(policy, names[2], 1)
        assert [row.id for row in spark.table(hostile).collect()] == [2]

        # A dropped entry is made again, also if the caller knows it. A new column needs nothing.
        first = qualified_entry_name(policy, names[0], 1)
        spark.sql(f"DROP TABLE {first}")
        new = pa.table({"id": [7], "added": ["a"]})
        write_deltalake(tables[0].path, new, mode="append", schema_mode="merge")
        assert dict(register_tables(spark, policy, tables, set(tables))) == found
        assert spark.table(first).columns == ["id", "added"]

        # The lake has moved: the entry of the old place is named, and stays.
        moved = CatalogTable(names[0], 1, f"{tables[0].path}-moved")
        shutil.copytree(tables[0].path, moved.path)
        ((table, error),) = register_tables(spark, policy, [moved])
        assert table == moved and error is not None
        assert f"at {moved.path} is not registered" in str(error)
        assert f"{tables[0].path}. Drop or rename that entry" in str(error)
        location = spark.sql(f"SHOW TABLE EXTENDED IN {schema} LIKE 'shop__orders__scd1'")
        assert "-moved" not in location.collect()[0].information

        # Entries that are no Delta tables, and a table that does not exist.
        taken = [TableName("shop", each) for each in ("parquet", "view", "none")]
        spark.sql(f"CREATE TABLE {schema}.shop__parquet__scd1 (a INT) USING parquet")
        spark.sql(f"CREATE VIEW {schema}.shop__view__scd1 AS SELECT 1 AS Location")
        wrong = [CatalogTable(name, 1, str(tmp_path / name.table)) for name in taken]
        errors = [str(error) for _, error in register_tables(spark, policy, wrong)]
        assert "is a table of parquet at" in errors[0]
        assert "is something without a location" in errors[1]
        assert "Spark reported PATH_NOT_FOUND" in errors[2]
        assert not (tmp_path / "none").exists()
        # Other tests of the session have left temporary views, which the statement lists too.
        listed = spark.sql(f"SHOW TABLES IN {schema}").where("NOT isTemporary")
        assert listed.count() == 5
    finally:
        spark.sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
    assert [DeltaTable(each.path).version() for each in tables] == [1, 0, 0]


@pytest.mark.spark
@pytest.mark.soak
def test_an_entry_in_the_memory_of_a_server_is_found_by_its_other_sessions(
    spark_server: RunningServer, tmp_path: Path
) -> None:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    policy = CatalogPolicy(f"cdc_{tmp_path.name}".lower())
    table = CatalogTable(TableName("shop", "orders"), 1, str(tmp_path / "orders"))
    write_deltalake(table.path, pa.table({"id": [1]}))
    sessions: list[Any] = [
        ConnectSession.builder.remote(spark_server.remote).create() for _ in range(2)
    ]
    registering, reading = sessions
    try:
        assert dict(register_tables(registering, policy, [table])) == {table: None}
        name = qualified_entry_name(policy, table.table, 1)
        assert [row.id for row in reading.table(name).collect()] == [1]
        # Both find the entry, and none replaces it.
        assert dict(register_tables(reading, policy, [table])) == {table: None}
    finally:
        reading.sql(f"DROP SCHEMA IF EXISTS {policy.name}.{policy.schema} CASCADE")
        for session in sessions:
            release_session(session)


@pytest.mark.spark
def test_a_session_without_the_catalog_is_named_with_the_setting(spark: SparkSession) -> None:
    check_catalog(spark, CatalogPolicy("cdc"))
    with pytest.raises(ConfigurationError, match=r"in memory: set spark\.sql\.catalogImpl"):
        check_catalog(spark, CatalogPolicy("cdc", "hive"))
    absent = CatalogPolicy("cdc", "unity", "uc")
    with pytest.raises(ConfigurationError, match=r"has no catalog uc: set spark\.sql\.catalog\.uc"):
        list(register_tables(spark, absent, [CatalogTable(TableName("a", "b"), 1, "/none")]))
