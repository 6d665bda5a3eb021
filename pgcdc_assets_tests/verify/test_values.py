"""Postgres's texts, converted to the expected values of typed columns."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from pgcdc_assets.verify.values import Unreadable, comparable, reader_for

UTC = pa.timestamp("us", tz="UTC")

EQUAL: list[tuple[str, pa.DataType, Any]] = [
    ("t", pa.bool_(), True),
    ("-9223372036854775808", pa.int64(), -(2**63)),
    ("1234.50", pa.decimal128(10, 2), Decimal("1234.50")),
    ("0.1", pa.float64(), 0.1),
    ("NaN", pa.float64(), float("nan")),
    ("-Infinity", pa.float64(), float("-inf")),
    ("0.1", pa.float32(), 0.1),
    ("1e+20", pa.float32(), 1e20),
    ("2024-02-29", pa.date32(), dt.date(2024, 2, 29)),
    ("0001-01-01", pa.date32(), dt.date(1, 1, 1)),
    (
        "2024-02-29 23:59:59.123456",
        pa.timestamp("us"),
        dt.datetime(2024, 2, 29, 23, 59, 59, 123456),
    ),
    ("1969-12-31 23:59:59.5+00", UTC, dt.datetime(1969, 12, 31, 23, 59, 59, 500000, dt.UTC)),
    ("2024-01-01 05:30:00+05:30", UTC, dt.datetime(2024, 1, 1, tzinfo=dt.UTC)),
    ("\\x00ff", pa.binary(), b"\x00\xff"),
    ("\\x", pa.binary(), b""),
    ("", pa.string(), ""),
    ("{}", pa.list_(pa.int32()), []),
    ("{1,NULL,-3}", pa.list_(pa.int32()), [1, None, -3]),
    (
        '{a,"",NULL,"NULL","q\\"u,o\\\\te{}"}',
        pa.list_(pa.string()),
        ["a", "", None, "NULL", 'q"u,o\\te{}'],
    ),
    ("{1.50,2.25}", pa.list_(pa.decimal128(5, 2)), [Decimal("1.50"), Decimal("2.25")]),
]


@pytest.mark.parametrize(("text", "kind", "value"), EQUAL)
def test_a_text_is_converted_to_its_value(text: str, kind: pa.DataType, value: Any) -> None:
    assert reader_for(kind)(text) == comparable(pa.array([value], kind))[0]


UNREADABLE: list[tuple[str, pa.DataType]] = [
    ("NaN", pa.decimal128(10, 2)),
    ("Infinity", pa.decimal128(10, 2)),
    ("infinity", pa.date32()),
    ("0044-03-15 BC", pa.date32()),
    ("20000-01-01", pa.date32()),
    ("294276-12-31 23:59:59.999999", pa.timestamp("us")),
    ("-infinity", UTC),
    ("0044-03-15 12:00:00 BC", pa.timestamp("us")),
    ("{{1,2},{3,4}}", pa.list_(pa.int32())),
    ("[0:1]={1,2}", pa.list_(pa.int32())),
]


@pytest.mark.parametrize(("text", "kind"), UNREADABLE)
def test_a_text_that_the_type_cannot_hold_is_unreadable(text: str, kind: pa.DataType) -> None:
    with pytest.raises(Unreadable):
        reader_for(kind)(text)


def test_lists_keep_null_and_empty_apart() -> None:
    column = pa.array([None, [], ["x"]], pa.list_(pa.string()))
    assert comparable(column) == [None, [], ["x"]]
