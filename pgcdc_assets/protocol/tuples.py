"""Conversion of many messages' tuples at once, from bytes to Arrow's `list<large_string>`.

A tuple (TupleData in 53.9 Logical Replication Message Formats) is an int16 column count and, per
column, a kind byte: `t` with an int32 length and a text, `n` for NULL, `u` for an unchanged TOAST
value that was not sent.

All tuples with the same number of columns are walked together, one column at a time. For each
column, numpy reads kind and length of all rows by one unaligned 8-byte read per row; kind and
length determine the position of the next column. One Arrow `take` then copies the texts: the
offsets `text start, text end, text start, ...` define an array over the received bytes with the
texts at the even indexes and the bytes between two texts at the odd indexes.

Every position is compared with the end of its message before the next read. A wrong length
therefore raises MalformedTuples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc_assets.protocol import utf8
from pgcdc_assets.protocol.frames import Bytes, Positions

TEXT = ord("t")
UNCHANGED = ord("u")
_NULL = ord("n")

TEXTS_TYPE = pa.list_(pa.field("element", pa.large_string(), nullable=True))
UNCHANGED_TYPE = pa.list_(pa.field("element", pa.int32(), nullable=False))


class MalformedTuples(Exception):
    """Tuples that break one rule of their layout. The caller knows the tuples' messages.

    Attributes:
        indexes: indexes of the tuples among the walked tuples.
        positions: offset of each fault in the buffer.
        reason: the sentence for the user.
    """

    def __init__(self, indexes: Positions, positions: Positions, reason: str) -> None:
        super().__init__(reason)
        self.indexes = indexes
        self.positions = positions
        self.reason = reason


class WireBuffer:
    """Received bytes, with views that read a big-endian integer at any offset.

    Attributes:
        bytes: the bytes.
        uint64: entry i is the 8-byte integer at offset i.
        uint32: entry i is the 4-byte integer at offset i.
        uint16: entry i is the 2-byte integer at offset i.
    """

    def __init__(self, buffer: Bytes) -> None:
        self.bytes = buffer
        self.uint64: npt.NDArray[np.uint64] = np.ndarray(
            (len(buffer) - 7,), ">u8", buffer=buffer, strides=(1,)
        )
        self.uint32: npt.NDArray[np.uint32] = np.ndarray(
            (len(buffer) - 3,), ">u4", buffer=buffer, strides=(1,)
        )
        self.uint16: npt.NDArray[np.uint16] = np.ndarray(
            (len(buffer) - 1,), ">u2", buffer=buffer, strides=(1,)
        )


@dataclass
class Values:
    """Positions of the column values of many tuples, row after row.

    Attributes:
        offsets: index of each row's first value, and the number of values as last entry: one entry
            more than rows.
        starts: offset of each value's text in the buffer.
        ends: offset behind each value's text.
        kinds: kind byte of each value.
    """

    offsets: Positions
    starts: Positions
    ends: Positions
    kinds: npt.NDArray[np.uint8]

    @classmethod
    def empty(cls, counts: Positions) -> Values:
        """Return uninitialised values for rows with `counts` values each."""
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        total = int(offsets[-1])
        return cls(
            offsets, np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.uint8)
        )


def walk(
    wire: WireBuffer, values: Values, rows: Positions, positions: Positions, limits: Positions
) -> Positions:
    """Fill in the values of one tuple per row, and return the offset behind each tuple.

    Args:
        wire: the received bytes.
        values: filled at `rows`; the offsets define the number of columns of each tuple.
        rows: row number of each tuple.
        positions: offset of each tuple.
        limits: offset behind each tuple's message.

    Raises:
        MalformedTuples: tuples have another number of columns, or reach beyond their messages.
    """
    expected = values.offsets[rows + 1] - values.offsets[rows]
    if (expected == expected[0]).all():
        first_values = values.offsets[rows]
        return _walk_alike(wire, values, int(expected[0]), first_values, positions, limits)
    ends = np.empty_like(positions)
    for column_count in np.unique(expected).tolist():
        chosen = np.flatnonzero(expected == column_count)
        try:
            ends[chosen] = _walk_alike(
                wire,
                values,
                column_count,
                values.offsets[rows[chosen]],
                positions[chosen],
                limits[chosen],
            )
        except MalformedTuples as error:
            raise MalformedTuples(chosen[error.indexes], error.positions, error.reason) from None
    return ends


def _walk_alike(
    wire: WireBuffer,
    values: Values,
    column_count: int,
    first_values: Positions,
    positions: Positions,
    limits: Positions,
) -> Positions:
    _check(positions + 2 <= limits, positions, "the message ends before its tuple")
    _check(
        wire.uint16[positions] == column_count,
        positions,
        f"the tuple does not have the {column_count} columns of its relation",
    )
    position = positions + 2
    for column in range(column_count):
        head = wire.uint64[position].astype(np.uint64)
        kinds = (head >> np.uint64(56)).astype(np.uint8)
        lengths = (head >> np.uint64(24)).astype(np.int64) & 0xFFFFFFFF
        is_text = kinds == TEXT
        if is_text.all():
            starts = position + 5
            ends = starts + lengths
        else:
            # A position at the message's end was read from the next message: refused below.
            is_known = is_text | (kinds == _NULL) | (kinds == UNCHANGED) | (position >= limits)
            _check(is_known, position, "the kind byte of a value is not t, n or u")
            starts = position + np.where(is_text, 5, 1)
            ends = starts + np.where(is_text, lengths, 0)
        _check(ends <= limits, position, "the message ends in the middle of a tuple")
        index = first_values + column
        values.starts[index] = starts
        values.ends[index] = ends
        values.kinds[index] = kinds
        position = ends
    return position


def _check(is_good: npt.NDArray[np.bool_], positions: Positions, reason: str) -> None:
    if not is_good.all():
        found = np.flatnonzero(~is_good)
        raise MalformedTuples(found, positions[found], reason)


def texts(
    wire: WireBuffer, values: Values, has_tuple: npt.NDArray[np.bool_]
) -> tuple[pa.ListArray, Positions]:
    """Return the list of texts per row, and the row number of each value written as hex.

    An element is NULL for a value of kind `n` or `u`. A list is NULL for a row without a tuple. A
    value that is not UTF-8 becomes hex (see `utf8`).
    """
    count = len(values.starts)
    # One more offset than pieces: the end of the last piece.
    bounds = np.empty(2 * count + 1, np.int64)
    bounds[0:-1:2] = values.starts
    bounds[1::2] = values.ends
    bounds[-1] = values.ends[-1] if count else 0
    pieces = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), 2 * count, [None, pa.py_buffer(bounds), pa.py_buffer(wire.bytes)]
    )
    cut_out = pieces.take(pa.array(np.arange(0, 2 * count, 2)))
    _, offsets, data = cut_out.buffers()
    is_text = values.kinds == TEXT
    elements = pa.LargeStringArray.from_buffers(count, offsets, data, _bitmap(is_text))
    rescued = np.empty(0, np.int64)
    try:
        elements.validate(full=True)
    except pa.ArrowInvalid:
        is_invalid = utf8.find_invalid(elements)
        elements = utf8.with_hex(elements, is_invalid)
        places = np.flatnonzero(is_invalid)
        rescued = np.searchsorted(values.offsets, places, side="right") - 1
    lists = pa.ListArray.from_arrays(
        pa.array(values.offsets.astype(np.int32)),
        elements,
        type=TEXTS_TYPE,
        mask=None if has_tuple.all() else pa.array(~has_tuple),
    )
    return lists, rescued


def unchanged_columns(values: Values) -> pa.ListArray:
    """Return per row the positions of unchanged TOAST values; NULL for a row without one."""
    row_count = len(values.offsets) - 1
    places = np.flatnonzero(values.kinds == UNCHANGED)
    if len(places) == 0:
        return pa.nulls(row_count, UNCHANGED_TYPE)
    rows = np.searchsorted(values.offsets, places, side="right") - 1
    counts = np.bincount(rows, minlength=row_count)
    offsets = np.zeros(row_count + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    columns = (places - values.offsets[rows]).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(columns), type=UNCHANGED_TYPE, mask=pa.array(counts == 0)
    )


def _bitmap(is_set: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    return None if is_set.all() else pa.py_buffer(np.packbits(is_set, bitorder="little"))
