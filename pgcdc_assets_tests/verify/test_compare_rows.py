"""The comparison finds planted differences, and no difference between equal rows."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify import Comparison, compare_table
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int32()),
        pa.field("v", pa.string()),
        pa.field("n", pa.decimal128(10, 2)),
        pa.field("_lsn", pa.int64()),
        pa.field("_rescued", pa.map_(pa.string(), pa.string())),
    ]
)
ROWS: list[dict[str, Any]] = [
    {"id": 1, "v": "one", "n": Decimal("1.50"), "_lsn": 1},
    {"id": 2, "v": None, "n": None, "_lsn": 1},
    {"id": 3, "v": "", "n": None, "_lsn": 1, "_rescued": [("n", "NaN")]},
]


@pytest.fixture
def source(database: Database) -> Database:
    database.execute("create table t (id int primary key, v text, n numeric(10, 2))")
    database.execute("insert into t values (1, 'one', 1.5), (2, null, null), (3, '', 'NaN')")
    database.execute("create publication pub for table t")
    return database


def compare(source: Database, zone: RawZone, rows: list[dict[str, Any]]) -> Comparison:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    write_deltalake(table_path(zone.lake, zone.name, "public", "t", 1), table, mode="overwrite")
    return compare_table(source.settings(), zone, "pub", "public", "t")


def test_equal_rows_in_another_order_are_equal(source: Database, zone: RawZone) -> None:
    found = compare(source, zone, ROWS[::-1])
    assert found == Comparison("public", "t", 3, 3)
    assert found.is_equal


def test_missing_extra_and_wrong_rows_are_counted_separately(
    source: Database, zone: RawZone
) -> None:
    wrong = {**ROWS[1], "v": "not null"}
    extra = {**ROWS[0], "id": 9}
    found = compare(source, zone, [wrong, ROWS[2], extra])
    assert (found.missing, found.extra, found.differing) == (1, 1, 1)
    assert found.columns == ("v",)
    assert not found.is_equal


def test_null_and_the_empty_text_differ(source: Database, zone: RawZone) -> None:
    found = compare(source, zone, [ROWS[0], {**ROWS[1], "v": ""}, ROWS[2]])
    assert found.differing == 1


def test_a_value_that_was_dropped_and_not_rescued_differs(source: Database, zone: RawZone) -> None:
    found = compare(source, zone, [*ROWS[:2], {**ROWS[2], "_rescued": None}])
    assert found.columns == ("n",)


def test_a_different_rescued_text_is_a_difference(source: Database, zone: RawZone) -> None:
    found = compare(source, zone, [*ROWS[:2], {**ROWS[2], "_rescued": [("n", "Infinity")]}])
    assert found.differing == 1


def test_a_missing_column_of_the_table_is_a_difference(source: Database, zone: RawZone) -> None:
    source.execute("alter table t add column added int")
    assert compare(source, zone, ROWS).columns == ("added",)


def test_a_table_that_was_never_merged_is_named(source: Database, zone: RawZone) -> None:
    with pytest.raises(ConfigurationError, match=r"public\.t was never merged"):
        compare_table(source.settings(), zone, "pub", "public", "t")


def test_a_row_that_the_table_has_twice_is_extra(source: Database, zone: RawZone) -> None:
    found = compare(source, zone, [*ROWS, ROWS[0]])
    assert (found.target_rows, found.missing, found.extra) == (4, 0, 1)
    assert not found.is_equal
    found = compare(source, zone, [*ROWS, {**ROWS[0], "v": "other"}])
    assert (found.missing, found.extra, found.differing) == (0, 1, 0)


def test_equal_rows_of_a_table_without_a_key_are_counted(source: Database, zone: RawZone) -> None:
    """D11."""
    source.execute("alter table t drop constraint t_pkey; alter table t replica identity full")
    source.execute("insert into t select t.* from t, generate_series(1, 2)")
    rows = 3 * ROWS
    assert compare(source, zone, rows) == Comparison("public", "t", 9, 9)
    assert compare(source, zone, [*rows, ROWS[0]]).extra == 1
    assert compare(source, zone, rows[1:]).missing == 1
