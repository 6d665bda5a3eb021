"""Values that are not UTF-8 are found, and converted to a text that preserves their bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.protocol import utf8

# Lead bytes, continuation bytes and limits of table 3-7 of Unicode, for values similar to UTF-8.
BORDERS = b"\x41\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc2\xdf\xe0\xe1\xed\xef\xf0\xf1\xf4\xf5\xff"
_bytes = st.lists(st.sampled_from(BORDERS), max_size=5).map(bytes)
# Postgres has no text with U+0000.
_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4)
_values = st.lists(st.one_of(_bytes, _texts.map(str.encode), st.none()), max_size=8)


def _array(values: list[bytes | None]) -> pa.LargeStringArray:
    binary = pa.array(values, pa.large_binary())
    return pa.LargeStringArray.from_buffers(len(values), *binary.buffers()[1:], binary.buffers()[0])


def _is_text(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


@settings(deadline=None)
@given(_values)
def test_invalid_values_are_those_that_python_cannot_decode(values: list[bytes | None]) -> None:
    found = utf8.find_invalid(_array(values))
    assert found.tolist() == [not _is_text(value) for value in values]


@pytest.mark.parametrize("last", [b"", b"\x80", b"\xbf"])
def test_invalid_values_are_found_among_all_combinations_of_borders(last: bytes) -> None:
    """Each value has neighbours that end with lead bytes or begin with continuation bytes."""
    values = [
        bytes(combination) + last
        for length in range(4)
        for combination in itertools.product(BORDERS, repeat=length)
    ]
    found = utf8.find_invalid(_array([*values]))
    wrong = [value for value, bad in zip(values, found, strict=True) if bad == _is_text(value)]
    assert wrong == []


@settings(deadline=None)
@given(_values)
def test_every_value_can_be_read_back(values: list[bytes | None]) -> None:
    array = _array(values)
    invalid = utf8.find_invalid(array)
    if not invalid.any():
        return
    written = utf8.with_hex(array, invalid)
    written.validate(full=True)
    assert [_read_back(text) for text in written.to_pylist()] == values


def _read_back(text: str | None) -> bytes | None:
    if text is None or not text.startswith(utf8.MARK):
        return None if text is None else text.encode()
    return bytes.fromhex(text.removeprefix(utf8.MARK))


def test_values_of_a_slice_are_found_at_their_positions() -> None:
    array = _array([b"\xff", b"a", b"\xe9", "\xe9".encode()]).slice(1)
    assert utf8.find_invalid(array).tolist() == [False, True, False]
    assert np.array(utf8.with_hex(array, np.array([False, True, False]))).tolist() == [
        "a",
        utf8.bytes_as_text(b"\xe9"),
        "\xe9",
    ]


def test_nulls_of_a_slice_keep_their_positions() -> None:
    values = [b"x", None, b"\xff", None, None, b"a", None, b"\xe9", b"b", None, b"c"]
    for start in range(9):
        array = _array(values).slice(start)
        written = utf8.with_hex(array, utf8.find_invalid(array)) if start < 8 else array
        written.validate(full=True)
        assert [_read_back(text) for text in written.to_pylist()] == values[start:]


def test_a_marked_value_becomes_hex_without_its_mark() -> None:
    """Some bytes of another encoding look like UTF-8."""
    values = [utf8.RAW + b"\xc3\x81", b"a", utf8.RAW + b"x" + utf8.RAW]
    written = utf8.with_hex(_array([*values]), utf8.find_invalid(_array([*values])))
    assert written.to_pylist() == ["\0\\xc381", "a", "\0\\x78ff00"]


def test_values_written_as_hex_are_counted_in_lists_of_texts() -> None:
    texts = pa.list_(pa.large_string())
    rows = [
        ["a", utf8.text_of_bytes(b"\xff"), None],
        None,
        [],
        [utf8.text_of_bytes(b"\0x"), "\\xff"],
    ]

    assert utf8.count_hex(pa.array(rows, texts)) == 2
    assert utf8.count_hex(pa.array(rows[1:3], texts)) == 0
    assert utf8.count_hex(pa.array(rows, texts)[1:]) == 1
