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
from pgcdc_assets.protocol.encodings import StoredEncoding
from pgcdc_assets.protocol.frames import HEAD_BYTES

_TAB, _NEWLINE, _BACKSLASH, _NULL_MARK = 0x09, 0x0A, 0x5C, 0x4E
# A block of this size and its intermediate arrays fit the processor's cache.
_BLOCK_BYTES = 256 * 1024
# A byte that is neither a separator nor an escape. The byte replaces heads, which are removed.
_FILLER = 0x2E

_UNESCAPED = np.arange(256, dtype=np.uint8)
for _letter, _byte in zip(b"bfnrtv", b"\b\f\n\r\t\v", strict=True):
    _UNESCAPED[_letter] = _byte

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

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


def decode_copy_text(
    chunk: CopyChunk, column_count: int, encoding: StoredEncoding | None = None
) -> pa.ListArray:
    """Return one list of texts per row of COPY text. SQL NULL becomes NULL.

    A value that is not UTF-8 becomes hex (see `protocol/utf8.py`).

    Args:
        data: whole rows of COPY text.
        column_count: number of columns of each row.
        encoding: the encoding of the text; None: UTF-8, or bytes without an encoding.

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
    ends, keep, newline_count = _separators(source)
    row_count, rest = divmod(len(ends), column_count)
    row_ends = ends[column_count - 1 :: column_count]
    if rest or newline_count != row_count or not (source[row_ends] == _NEWLINE).all():
        raise _malformed(f"{len(ends)} values in {newline_count} rows of {column_count} columns")
    if len(source) and (not row_count or row_ends[-1] != len(source) - 1):
        raise _malformed("the last row has no newline at its end")
    if heads is not None and not np.array_equal(heads[1:], row_ends[:-1] + 1):
        raise _malformed("a message is not one row")

    # Per value, the bytes before and in the value that are not part of a text. First the separator
    # before the value.
    removed = np.ones(len(ends), np.int64)
    removed[:1] = 0
    if heads is not None:
        removed[::column_count] += HEAD_BYTES
        for position in range(HEAD_BYTES):
            keep[heads + position] = False
    is_null = _unescape(source, ends, keep, removed)
    np.cumsum(removed, out=removed)
    offsets = np.zeros(len(ends) + 1, np.int64)
    np.subtract(ends, removed, out=offsets[1:])
    validity = pa.py_buffer(np.packbits(~is_null, bitorder="little")) if is_null.any() else None
    text = _kept(source, keep, int(offsets[-1]))
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(text)]
    values = pa.LargeStringArray.from_buffers(len(ends), buffers[1], buffers[2], buffers[0])
    if encoding is not None:
        values = encoding.convert_array(values)
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        values = utf8.with_hex(values, utf8.find_invalid(values))
    rows = np.arange(row_count + 1, dtype=np.int32) * np.int32(column_count)
    return pa.ListArray.from_arrays(rows, values, type=TEXTS)


def _separators(source: Bytes) -> tuple[Positions, Mask, int]:
    """Return the positions of the separators, a flag per other byte, and the number of newlines."""
    is_other = np.empty(len(source), np.bool_)
    scratch = np.empty(min(len(source), _BLOCK_BYTES), np.bool_)
    ends, newline_count = [], 0
    for start in range(0, len(source), _BLOCK_BYTES):
        block, flags = source[start : start + _BLOCK_BYTES], is_other[start : start + _BLOCK_BYTES]
        is_tab = scratch[: len(block)]
        np.equal(block, _TAB, out=is_tab)
        np.equal(block, _NEWLINE, out=flags)
        newline_count += int(np.count_nonzero(flags))
        flags |= is_tab
        found = np.flatnonzero(flags)
        found += start
        ends.append(found)
        np.logical_not(flags, out=flags)
    return np.concatenate(ends) if ends else np.zeros(0, np.intp), is_other, newline_count


def _kept(source: Bytes, keep: Mask, size: int) -> Bytes:
    """Return the `size` bytes with a flag."""
    text = np.empty(size, np.uint8)
    position = 0
    for start in range(0, len(source), _BLOCK_BYTES):
        block = source[start : start + _BLOCK_BYTES][keep[start : start + _BLOCK_BYTES]]
        text[position : position + len(block)] = block
        position += len(block)
    return text


def _unescape(source: Bytes, ends: Positions, keep: Mask, removed: Positions) -> Mask:
    """Replace escaped characters, and return which values are NULL.

    A large value may consist of escapes, and the positions of escapes need many times its size. The
    bytes are therefore read in pieces.

    Args:
        source: whole rows, which are changed.
        ends: positions of the separators.
        keep: cleared at the characters that are not part of a text.
        removed: per value, increased by the number of these characters.
    """
    is_null = np.zeros(len(ends), dtype=bool)
    begins_escaped = False
    for start in range(0, len(source), _BLOCK_BYTES):
        stop = min(start + _BLOCK_BYTES, len(source))
        escapes = _escapes(source[start:stop], begins_escaped) + start
        begins_escaped = bool(len(escapes)) and int(escapes[-1]) == stop - 1
        if begins_escaped and stop == len(source):
            raise _malformed("the last escape is cut short")
        if not len(escapes):
            continue
        escaped = source[escapes + 1]
        is_mark = escaped == _NULL_MARK
        source[escapes + 1] = _UNESCAPED[escaped]
        keep[escapes] = False
        keep[escapes[is_mark] + 1] = False
        first, last = np.searchsorted(ends, (escapes[0], escapes[-1]))
        owners = np.searchsorted(ends[first : last + 1], escapes)
        removed[first : last + 1] += np.bincount(owners) + np.bincount(
            owners[is_mark], minlength=last + 1 - first
        )
        is_null[first + owners[is_mark]] = True
    return is_null


def _escapes(piece: Bytes, begins_escaped: bool) -> Positions:
    """Return the positions of the backslashes that begin an escape.

    In a run of backslashes, the first, third, fifth, ... backslash begins an escape.

    Args:
        begins_escaped: the first byte is escaped by the byte before the piece.
    """
    skipped = int(begins_escaped)
    backslashes = np.flatnonzero(piece[skipped:] == _BACKSLASH) + skipped
    if not len(backslashes):
        return backslashes
    starts = np.ones(len(backslashes), dtype=bool)
    starts[1:] = np.diff(backslashes) != 1
    run_start = np.maximum.accumulate(np.where(starts, backslashes, 0))
    is_first_of_pair = (backslashes - run_start) % 2 == 0
    return np.asarray(backslashes[is_first_of_pair])


def _malformed(reason: str) -> ProtocolError:
    return ProtocolError(message_type="CopyData", offset=0, reason=reason)
