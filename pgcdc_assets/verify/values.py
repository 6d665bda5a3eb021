"""Conversion of Postgres's texts to the values of typed columns, for comparisons.

The conversion is independent of the merge on purpose, so that an error in either is detected. Dates
and timestamps become numbers of days and microseconds. Those above the year 9999 are texts, as in
the merge.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Reader = Callable[[str], Any]

_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)")
_TIMESTAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?"
    r"(?:([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?)?"
)
_MICROSECONDS_PER_DAY = 86_400_000_000


class Unreadable(ValueError):
    """A text that the typed column cannot hold, such as infinity, so that it must be rescued."""


def reader_for(kind: pa.DataType) -> Reader:
    """Return the function that reads the texts of a column of this type."""
    if pa.types.is_boolean(kind):
        return _boolean
    if pa.types.is_integer(kind):
        return int
    if pa.types.is_decimal(kind):
        return _decimal(kind.precision, kind.scale)
    if pa.types.is_float64(kind):
        return lambda text: repr(float(text))
    if pa.types.is_float32(kind):
        return lambda text: repr(_single(float(text)))
    if pa.types.is_date(kind):
        return _date
    if pa.types.is_timestamp(kind):
        return _timestamp
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or _is_view(kind):
        return _bytea
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _array(reader_for(kind.value_type))
    return str


def comparable(column: pa.Array) -> list[Any]:
    """Return a target column's values in the form of the readers."""
    kind = column.type
    if pa.types.is_decimal(kind):
        return [None if v is None else format(v, "f") for v in column.to_pylist()]
    if pa.types.is_floating(kind):
        return [None if v is None else repr(v) for v in column.to_pylist()]
    if pa.types.is_date32(kind):
        return list(column.cast(pa.int32()).to_pylist())
    if pa.types.is_timestamp(kind):
        return list(column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).to_pylist())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        values = comparable(pc.list_flatten(column))
        lengths = pc.list_value_length(column).to_pylist()
        rows, start = [], 0
        for length in lengths:
            rows.append(None if length is None else values[start : start + length])
            start += length or 0
        return rows
    return list(column.to_pylist())


def _boolean(text: str) -> bool:
    return {"t": True, "f": False}[text]


def _decimal(precision: int, scale: int) -> Reader:
    def read(text: str) -> str:
        try:
            value = Decimal(text)
        except InvalidOperation:
            raise Unreadable(text) from None
        if not value.is_finite() or (value and value.adjusted() >= precision - scale):
            raise Unreadable(text)
        return format(value, "f")

    return read


def _single(value: float) -> float:
    number: float = struct.unpack("f", struct.pack("f", value))[0]
    return number


def _date(text: str) -> int:
    match = _DATE.fullmatch(text)
    if match is None:
        raise Unreadable(text)
    return _days(*(int(part) for part in match.groups()))


def _timestamp(text: str) -> int:
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise Unreadable(text)
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    micros = int((match[7] or "").ljust(6, "0"))
    seconds = hour * 3600 + minute * 60 + second
    if match[8] is not None:
        offset = int(match[9]) * 3600 + int(match[10] or 0) * 60 + int(match[11] or 0)
        seconds -= offset if match[8] == "+" else -offset
    return _days(year, month, day) * _MICROSECONDS_PER_DAY + seconds * 1_000_000 + micros


def _days(year: int, month: int, day: int) -> int:
    """Return the days since 1970-01-01 in the proleptic Gregorian calendar.

    See http://howardhinnant.github.io/date_algorithms.html#days_from_civil.
    """
    shifted = year - (month <= 2)
    era, of_era = divmod(shifted, 400)
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def _bytea(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("\\x"))


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary_view(kind))


def _array(element: Reader) -> Reader:
    def read(text: str) -> list[Any]:
        return [None if item is None else element(item) for item in array_elements(text)]

    return read


def array_elements(text: str) -> list[str | None]:
    """Split a one-dimensional array's text (https://www.postgresql.org/docs/current/arrays.html)."""
    if not text.startswith("{") or not text.endswith("}"):
        raise Unreadable(text)
    found: list[str | None] = []
    position, end = 1, len(text) - 1
    while position < end:
        if text[position] == "{":
            raise Unreadable(text)
        if text[position] == '"':
            item, position = _quoted(text, position + 1)
            found.append(item)
        else:
            stop = text.find(",", position, end)
            stop = end if stop < 0 else stop
            word = text[position:stop]
            found.append(None if word == "NULL" else word)
            position = stop
        position += 1
    return found


def _quoted(text: str, position: int) -> tuple[str, int]:
    characters = []
    while text[position] != '"':
        if text[position] == "\\":
            position += 1
        characters.append(text[position])
        position += 1
    return "".join(characters), position + 1
