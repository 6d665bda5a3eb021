"""Conversion of COPY's text format to Arrow, without a Python loop over rows or values.

The text format escapes a tab and a newline inside a value
(https://www.postgresql.org/docs/current/sql-copy.html, "Text Format"). Every unescaped tab or
newline therefore ends a value. The values are in row order, as in the value buffer of an Arrow
list array. One masked copy removes the separators and the escape characters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import utf8
from pgcdc_assets.protocol.frames import HEAD_BYTES

_TAB, _NEWLINE, _BACKSLASH, _NULL_MARK = 0x09, 0x0A, 0x5C, 0x4E
# A byte that is neither a separator nor an escape. The byte replaces heads, which are removed.
_FILLER = 0x2E

_UNESCAPED = np.arange(256, dtype=np.uint8)
for _letter, _byte in zip(b"bfnrtv", b"\b\f\n\r\t\v", strict=True):
    _UNESCAPED[_letter] = _byte

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.intp]

TEXTS = pa.list_(pa.field("element", pa.large_string(), nullable=True))


class CopyChunk(NamedTuple):
    """Whole rows of COPY text.

    Attributes:
        source: the bytes, which decoding overwrites.
        heads: offsets of the heads of protocol frames, one before each row; None without heads.
    """

    source: Bytes
    heads: Positions | None = None

    @classmethod
    def of(cls, data: bytes) -> CopyChunk:
        """Return a chunk of rows without heads."""
        return cls(np.frombuffer(bytearray(data), dtype=np.uint8))


def decode_copy_text(chunk: CopyChunk, column_count: int) -> pa.ListArray:
    """Return one list of texts per row of COPY text. SQL NULL becomes NULL.

    A value that is not UTF-8 becomes hex (see `protocol/utf8.py`).

    Args:
        data: whole rows of COPY text.
        column_count: number of columns of each row.

    Raises:
        ProtocolError: the bytes are not whole rows of `column_count` columns.
    """
    source, heads = chunk
    if heads is not None:
        for position in range(HEAD_BYTES):
            source[heads + position] = _FILLER
    if column_count == 0:
        row_count = int(np.count_nonzero(source == _NEWLINE))
        nothing = pa.array([], TEXTS.value_type)
        return pa.ListArray.from_arrays(np.zeros(row_count + 1, np.int32), nothing, type=TEXTS)
    is_separator = (source == _NEWLINE) | (source == _TAB)
    ends = np.flatnonzero(is_separator)
    row_count, rest = divmod(len(ends), column_count)
    row_ends = ends[column_count - 1 :: column_count]
    newline_count = np.count_nonzero(source == _NEWLINE)
    if rest or newline_count != row_count or not (source[row_ends] == _NEWLINE).all():
        raise _malformed(f"{len(ends)} values in {newline_count} rows of {column_count} columns")
    if row_count and row_ends[-1] != len(source) - 1:
        raise _malformed("the last row has no newline at its end")
    if heads is not None and not np.array_equal(heads[1:], row_ends[:-1] + 1):
        raise _malformed("a message is not one row")

    keep = ~is_separator
    offsets = np.zeros(len(ends) + 1, np.int64)
    offsets[1:] = ends - np.arange(len(ends))
    if heads is not None:
        for position in range(HEAD_BYTES):
            keep[heads + position] = False
        by_row = offsets[1:].reshape(row_count, column_count)
        by_row -= HEAD_BYTES * np.arange(1, row_count + 1)[:, None]
    validity = None
    escapes = _escapes(source)
    if len(escapes):
        escaped = source[escapes + 1]
        is_null = escaped == _NULL_MARK
        nulls = escapes[is_null]
        source[escapes + 1] = _UNESCAPED[escaped]
        keep[escapes] = False
        keep[nulls + 1] = False
        offsets[1:] -= np.searchsorted(escapes, ends) + np.searchsorted(nulls, ends)
        is_valid = np.ones(len(ends), dtype=bool)
        is_valid[np.searchsorted(ends, nulls)] = False
        validity = pa.py_buffer(np.packbits(is_valid, bitorder="little"))
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(source[keep])]
    values = pa.LargeStringArray.from_buffers(len(ends), buffers[1], buffers[2], buffers[0])
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        values = utf8.with_hex(values, utf8.find_invalid(values))
    rows = np.arange(row_count + 1, dtype=np.int32) * np.int32(column_count)
    return pa.ListArray.from_arrays(rows, values, type=TEXTS)


def _escapes(source: Bytes) -> Positions:
    """Return the positions of the backslashes that begin an escape.

    In a run of backslashes, the first, third, fifth, ... backslash begins an escape.
    """
    backslashes = np.flatnonzero(source == _BACKSLASH)
    if not len(backslashes):
        return backslashes
    if backslashes[-1] == len(source) - 1:
        raise _malformed("the last escape is cut short")
    starts = np.ones(len(backslashes), dtype=bool)
    starts[1:] = np.diff(backslashes) != 1
    run_start = np.maximum.accumulate(np.where(starts, backslashes, 0))
    is_first_of_pair = (backslashes - run_start) % 2 == 0
    return np.asarray(backslashes[is_first_of_pair])


def _malformed(reason: str) -> ProtocolError:
    return ProtocolError(message_type="CopyData", offset=0, reason=reason)
