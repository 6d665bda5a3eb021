"""COPY's text format: the decoder reads the output of an encoder like CopyAttributeOutText()."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.postgres.copy.text import CopyChunk, decode_copy_text
from pgcdc_assets.protocol.frames import HEAD_BYTES
from pgcdc_assets_tests.support.protocol.encoding import frame

_ESCAPES = {
    "\\": "\\\\",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
}
_TEXTS = st.one_of(
    st.none(),
    st.text(alphabet=st.sampled_from("\\N\t\n\r\b\f\vabnt"), max_size=8),
    st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
)


def encode(rows: list[list[str | None]]) -> bytes:
    lines = (
        "\t".join("\\N" if v is None else "".join(_ESCAPES.get(c, c) for c in v) for v in row)
        for row in rows
    )
    return "".join(line + "\n" for line in lines).encode()


@settings(deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(_TEXTS, min_size=n, max_size=n))))
def test_any_rows_survive_a_round_trip(rows: list[list[str | None]]) -> None:
    width = len(rows[0]) if rows else 3
    assert decode_copy_text(CopyChunk.of(encode(rows)), width).to_pylist() == rows


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_escapes_across_blocks_survive_a_round_trip(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc_assets.postgres.copy.text._BLOCK_BYTES", size)
    values = ["\\" * n + end for n in range(6) for end in ("", "a", "\t", "\n")]
    rows = [["N", None, value, "\\N", None] for value in (*values, "", None, "ab\\\\N")]
    assert decode_copy_text(CopyChunk.of(encode(rows)), 5).to_pylist() == rows


def test_rows_without_columns_are_counted() -> None:
    assert decode_copy_text(CopyChunk.of(b"\n\n\n"), 0).to_pylist() == [[], [], []]


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        (b"a\tb\nc\n", 2),
        (b"a\tb\tc\n", 2),
        (b"a\nb\tc\td\n", 2),
        (b"a\tb", 2),
        (b"a\tb\nrest", 2),
        (b"a\\", 1),
    ],
)
def test_bytes_that_are_not_rows_are_a_protocol_error(data: bytes, columns: int) -> None:
    with pytest.raises(ProtocolError):
        decode_copy_text(CopyChunk.of(data), columns)


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(1, 4))
def test_random_bytes_give_rows_or_a_protocol_error(data: bytes, columns: int) -> None:
    try:
        rows = decode_copy_text(CopyChunk.of(data), columns)
    except ProtocolError:
        return
    assert all(len(row) == columns for row in rows.to_pylist())


def test_a_value_that_is_not_utf8_becomes_hex() -> None:
    rows = decode_copy_text(CopyChunk.of(b"\xff\\t\t\\\\xff\n\\N\t\xc3\xa9\n"), 2).to_pylist()
    assert rows == [["\0\\xff09", "\\xff"], [None, "\xe9"]]


def framed(rows: list[list[str | None]]) -> CopyChunk:
    """Write rows as a server sends them, each in a message."""
    lines = [encode([row]) for row in rows]
    data = b"".join(frame(line) for line in lines)
    sizes = np.array([HEAD_BYTES + len(line) for line in lines], np.int64)
    heads = np.cumsum(sizes) - sizes
    return CopyChunk(CopyChunk.of(data).source, heads)


@settings(deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(_TEXTS, min_size=n, max_size=n))))
def test_rows_in_messages_are_the_same_rows(rows: list[list[str | None]]) -> None:
    width = len(rows[0]) if rows else 3
    assert decode_copy_text(framed(rows), width).to_pylist() == rows


def test_rows_in_messages_without_columns_are_counted() -> None:
    assert decode_copy_text(framed([[], []]), 0).to_pylist() == [[], []]


def test_a_message_of_two_rows_is_a_protocol_error() -> None:
    data = frame(b"a\n") + frame(b"b\nc\n")
    chunk = CopyChunk(CopyChunk.of(data).source, np.array([0, 7], np.int64))
    with pytest.raises(ProtocolError, match="a message is not one row"):
        decode_copy_text(chunk, 1)


@pytest.mark.parametrize("value", ["\\", "\n", "x\t", 'a"b\\"'])
def test_a_large_row_of_escapes_is_decoded_in_a_few_times_its_size(value: str) -> None:
    data = encode([["1", value * (8_000_000 // len(value))]])
    chunk = CopyChunk.of(data)
    tracemalloc.start()
    try:
        decode_copy_text(chunk, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Two masks and the text, and the positions of the escapes of one piece.
    assert peak < 3 * len(data) + 100 * 1024 * 1024
