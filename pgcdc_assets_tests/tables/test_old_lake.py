"""A lake of an earlier release is read and continued by this release.

`old_lake.tar.xz` was written at commit a0fe544, before the modules were moved. The lake has the raw
zone of one epoch, and each kind of SCD table after two merges. The content is a contract: folders,
column names, table properties, and the records in the Delta logs.
"""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import MergeReport, merge_tables, rebuild_table
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import read_watermark, table_path
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    update,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_ARCHIVE = Path(__file__).with_name("old_lake.tar.xz")
_MERGED_THROUGH = 0x1030
# The second window has no change of these tables, so their watermark is the first window's end.
_IDLE, _IDLE_THROUGH = ("kept", "bag"), 0x1020
_NUMERIC_10_2 = (10 << 16 | 2) + 4
_TABLES = [
    CdcTable("shop", "items", (1, 2)),
    CdcTable("shop", "kept", soft_deletes=True),
    CdcTable("shop", "bag"),
    CdcTable("shop", "log", without_key="log"),
]


def _table(name: str, number: int, key: tuple[str, ...], identity: str) -> Relation:
    return relation(
        column("id"),
        column("name", "text"),
        column("price", "numeric", _NUMERIC_10_2),
        key=key,
        identity=identity,
        table=name,
        relation_id=number,
    )


@pytest.fixture
def landing(tmp_path: Path) -> Landing:
    """Unpack the old lake, and return a writer of further windows."""
    with tarfile.open(_ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    relations = [
        _table("items", 1000, ("id",), "d"),
        _table("kept", 1001, ("id",), "d"),
        _table("bag", 1002, (), "f"),
        _table("log", 1003, (), "f"),
    ]
    zone = RawZone(Lake(str(tmp_path / "lake")), "old")
    return Landing(zone, relations, lsn=_MERGED_THROUGH)


def _rows(spark: SparkSession, landing: Landing, table: str, scd: int, *columns: str) -> list[str]:
    path = table_path(landing.zone.lake, "old", "shop", table, scd)
    rows = spark.read.format("delta").load(path).selectExpr(*columns).collect()
    return sorted(" ".join("-" if value is None else str(value) for value in row) for row in rows)


def _contents(spark: SparkSession, landing: Landing) -> dict[str, list[str]]:
    row = ["id", "name", "price", "_rescued['price']"]
    return {
        "items": _rows(spark, landing, "items", 1, *row),
        "versions": _rows(spark, landing, "items", 2, *row[:3], "_is_current", "_op"),
        "kept": _rows(spark, landing, "kept", 1, *row, "_deleted"),
        "bag": _rows(spark, landing, "bag", 1, *row),
        "log": _rows(spark, landing, "log", 1, "_op", *row),
    }


_CONTINUED = {
    "items": ["1 again 1.10 -", "2 two 9.00 -", "3 three 3.00 -"],
    "versions": [
        "1 again 1.10 True I",
        "1 one 1.00 False S",
        "2 TWO 2.50 False U",
        "2 two 2.00 False S",
        "2 two 9.00 True U",
        "3 three - False S",
        "3 three 3.00 True U",
        "4 four 4.00 False I",
    ],
    "kept": ["1 back 5.00 - False", "2 two - NaN False", "3 three 3.00 - False"],
    "bag": ["1 one 1.00 -", "1 one 1.00 -", "5 five 5.00 -"],
    "log": [
        "D 2 two - NaN",
        "I 3 three 3.00 -",
        "S 1 one 1.00 -",
        "S 2 two - NaN",
        "U 1 uno 1.00 -",
    ],
}


def test_merges_into_an_old_lake_continue_from_its_watermarks(
    spark: SparkSession, landing: Landing
) -> None:
    for table in _TABLES:
        for scd in table.scd:
            at = read_watermark(landing.zone.lake, "old", "shop", table.table, scd)
            through = _IDLE_THROUGH if table.table in _IDLE else _MERGED_THROUGH
            assert at == (1, Lsn(through)), table
    window = landing.land(
        [
            update("2", "two", "9.00"),
            delete("4", None, None),
            insert("1", "back", "5.00", relation_id=1001),
            insert("5", "five", "5.00", relation_id=1002),
            delete("2", "two", "NaN", old_kind="O", relation_id=1003),
        ]
    )
    reports = list(merge_tables(spark, landing.zone, _TABLES, window))
    assert [r for r in reports if not isinstance(r, MergeReport)] == []
    assert _contents(spark, landing) == _CONTINUED
    for table in _TABLES[:2]:
        for scd in table.scd:
            assert check_all(spark, landing.zone, table, scd).is_sound, (table, scd)


@pytest.mark.sampled
def test_the_tables_of_an_old_lake_are_rebuilt_from_its_raw_zone(
    spark: SparkSession, landing: Landing
) -> None:
    before = _contents(spark, landing)
    for table in _TABLES:
        for scd in table.scd:
            rebuild_table(spark, landing.zone, table, scd)
    assert _contents(spark, landing) == before


@pytest.mark.soak
def test_the_tables_of_an_old_lake_follow_renamed_and_dropped_columns(
    spark: SparkSession, landing: Landing
) -> None:
    """Their columns have no identity yet: the recorded relation version identifies them."""
    changed = []
    for old in landing.relations:
        identifier, name, price = old.columns
        columns = (identifier, replace(price, name="name"), replace(name, name="cost", attnum=4))
        changed.append(replace(old, columns=columns))
    landing.relations = [*landing.relations, *changed]
    landing.describe()
    window = landing.land(
        [
            update("2", "9.00", "two", version=2),
            insert("6", "6.00", None, relation_id=1001, version=2),
            delete("1", "1.00", None, old_kind="O", relation_id=1002, version=2),
            insert("6", "6.00", None, relation_id=1003, version=2),
        ]
    )
    reports = list(merge_tables(spark, landing.zone, _TABLES, window))
    assert [r for r in reports if not isinstance(r, MergeReport)] == []
    row = ["id", "name", "cost"]
    assert _rows(spark, landing, "items", 1, *row, "_rescued['name']")[1:] == [
        "2 9.00 two -",
        "3 3.00 - -",
        "4 4.00 - -",
    ]
    past = ["id", "name_dropped_2", *row[1:], "_is_current"]
    assert "2 TWO 2.50 - False" in _rows(spark, landing, "items", 2, *past)
    assert "2 - 9.00 two True" in _rows(spark, landing, "items", 2, *past)
    assert "2 two - - NaN" in _rows(spark, landing, "kept", 1, *past[:-1], "_rescued['name']")
    assert _rows(spark, landing, "bag", 1, *row) == ["1 1.00 -"]
    assert "I 6 - 6.00 -" in _rows(spark, landing, "log", 1, "_op", *past[:-1])
    before = [_rows(spark, landing, "items", scd, *row) for scd in (1, 2)]
    for scd in (1, 2):
        rebuild_table(spark, landing.zone, _TABLES[0], scd)
    assert [_rows(spark, landing, "items", scd, *row) for scd in (1, 2)] == before
