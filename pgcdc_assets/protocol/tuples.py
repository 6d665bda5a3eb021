"""Tuples of many messages at once: from bytes to Arrow's `list<large_string>`.

A tuple is a column count and, per column, a kind byte: `t` with a length and a text, `n` for NULL,
`u` for an unchanged TOAST value that was not sent. All tuples with the same number of columns are
walked together, one column at a time: numpy gathers kind and length of that column for all rows in
one unaligned 8-byte read each and so finds where the next column begins. The texts are then cut out
by one Arrow `take`: an array whose offsets are text start, text end, text start ... over the
received bytes has the texts at its even places and the bytes between them at the odd ones.

A position beyond its own message's end is seen before anything is read there, so lying lengths end
as ProtocolError.
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


class MalformedTuple(Exception):
    """Says which of the walked tuples is malformed; the caller knows its message.

    Attributes:
        index: into the walked tuples.
        position: in the buffer.
    """

    def __init__(self, index: int, position: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.position = position
        self.reason = reason


class WireBuffer:
    """Received bytes with big-endian integers readable at any position."""

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
    """Where the column values of many tuples lie, row after row.

    Attributes:
        offsets: per row, the index of its first value; one more at the end.
        starts: per value, where its text begins.
        ends: per value, where its text ends.
        kinds: per value, its kind byte.
    """

    offsets: Positions
    starts: Positions
    ends: Positions
    kinds: npt.NDArray[np.uint8]

    @classmethod
    def empty(cls, counts: Positions) -> Values:
        """Make room for rows of so many values each."""
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        total = int(offsets[-1])
        return cls(
            offsets, np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.uint8)
        )


def walk(
    wire: WireBuffer, values: Values, rows: Positions, positions: Positions, limits: Positions
) -> Positions:
    """Find the values of one tuple per row, and return where each tuple ends.

    Args:
        values: filled at `rows`; its offsets say how many columns each tuple must have.
        positions: where the tuples begin.
        limits: where their messages end.

    Raises:
        MalformedTuple: a tuple has another number of columns, or reaches beyond its message.
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
        except MalformedTuple as error:
            raise MalformedTuple(int(chosen[error.index]), error.position, error.reason) from None
    return ends


def _walk_alike(
    wire: WireBuffer,
    values: Values,
    column_count: int,
    first_values: Positions,
    positions: Positions,
    limits: Positions,
) -> Positions:
    _check(positions + 2 <= limits, positions, "it ends before its tuple")
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
            # At the message's end whatever follows was read: that is refused below.
            is_known = is_text | (kinds == _NULL) | (kinds == UNCHANGED) | (position >= limits)
            _check(is_known, position, "the kind of a value is none of t, n and u")
            starts = position + np.where(is_text, 5, 1)
            ends = starts + np.where(is_text, lengths, 0)
        _check(ends <= limits, position, "it ends in the middle of a tuple")
        index = first_values + column
        values.starts[index] = starts
        values.ends[index] = ends
        values.kinds[index] = kinds
        position = ends
    return position


def _check(is_good: npt.NDArray[np.bool_], positions: Positions, reason: str) -> None:
    if not is_good.all():
        first = int(np.flatnonzero(~is_good)[0])
        raise MalformedTuple(first, int(positions[first]), reason)


def texts(
    wire: WireBuffer, values: Values, has_tuple: npt.NDArray[np.bool_]
) -> tuple[pa.ListArray, Positions]:
    """Build the list of texts per row, NULL for values without a text and for rows without a tuple.

    Returns also, once per value that is not UTF-8 and stands as hex, the number of its row.
    """
    count = len(values.starts)
    # One offset more, that of the end.
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
    """List per row the columns that are unchanged TOAST; NULL where there are none."""
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
