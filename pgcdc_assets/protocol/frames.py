"""Splitting of a connection's bytes into protocol messages, a whole buffer at a time.

A frame of Postgres's protocol has one type byte, four bytes of length (the length includes these
four bytes) and a payload (53.7 Message Formats). Nearly all frames of a replication stream are
CopyData (`d`), with XLogData (`w`) or a keepalive (`k`) as payload (53.4 Streaming Replication
Protocol).

To follow the lengths one by one in Python costs 0.4 microseconds a message, more than the decoding
of the message. numpy therefore searches the whole buffer for positions that look like the head of
a frame. The search result is right if the length at each position leads exactly to the next
position. If one length does not, Python follows the lengths of this buffer frame by frame.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pgcdc_assets.errors import ProtocolError

HEAD_BYTES = 5

# Unaligned reads of 8 bytes may reach beyond a message's end: every buffer ends with spare bytes.
SLACK_BYTES = 16

# A block of this size and its intermediate arrays fit the processor's cache.
_BLOCK_BYTES = 128 * 1024

_COPY_DATA = ord("d")
_NEWLINE = ord("\n")
XLOG_DATA = ord("w")
KEEPALIVE = ord("k")

_head = struct.Struct("!cI").unpack_from

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]
_Choice = Callable[[Bytes, Positions], _Mask]


class MessageBatch(NamedTuple):
    """Payloads of CopyData messages in stream order, all in one buffer.

    Attributes:
        buffer: the bytes; `ends[-1] + SLACK_BYTES` bytes at least.
        starts: offset of each payload's first byte.
        ends: offset behind each payload's last byte.
    """

    buffer: Bytes
    starts: Positions
    ends: Positions

    @classmethod
    def of(cls, payloads: Sequence[bytes | memoryview]) -> MessageBatch:
        """Return a batch of separate payloads, copied into one buffer."""
        lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
        ends = np.cumsum(lengths)
        joined = b"".join([*payloads, bytes(SLACK_BYTES)])
        return cls(np.frombuffer(joined, np.uint8), ends - lengths, ends)

    @property
    def size_bytes(self) -> int:
        """The bytes of the payloads with the heads of their messages."""
        return int((self.ends - self.starts).sum()) + HEAD_BYTES * len(self.starts)


class FramingError(ProtocolError):
    """Bytes of a connection that are not frames of a stream.

    Attributes:
        received: the bytes that were read and not handed on, which hold values of rows.
    """

    received: bytes = field(default=b"", init=False)


class Frames(NamedTuple):
    """The frames of a buffer up to the first frame that is incomplete or of another type.

    Attributes:
        batch: the complete CopyData payloads.
        consumed: offset of the first frame outside `batch`.
        needed: size in bytes of the frame at `consumed`; 0 if its head is incomplete.
        other: type byte of the frame at `consumed` if the frame is complete and no CopyData.
    """

    batch: MessageBatch
    consumed: int
    needed: int
    other: bytes | None


def cut(buffer: Bytes, start: int, end: int) -> Frames:
    """Return the frames of `buffer[start:end]`. A frame begins at `start`.

    Raises:
        ProtocolError: a frame's length is below 4 or above 2^31-1.
    """
    return _cut(buffer, start, end, _begins_message)


def cut_rows(buffer: Bytes, start: int, end: int) -> Frames:
    """Return the frames of COPY text in `buffer[start:end]`. A frame begins at `start`.

    Each payload is one row with its newline: the server sends one message per row, and escapes a
    newline inside a value (https://www.postgresql.org/docs/current/protocol-flow.html, "COPY
    Operations").

    Raises:
        ProtocolError: a frame's length is below 4 or above 2^31-1.
    """
    return _cut(buffer, start, end, _begins_row)


def _begins_message(view: Bytes, places: Positions) -> _Mask:
    """Return a flag per position: the head of a message of a replication stream."""
    inner = view[places + HEAD_BYTES]
    chosen: _Mask = (inner == XLOG_DATA) | (inner == KEEPALIVE)
    return chosen


def _begins_row(view: Bytes, places: Positions) -> _Mask:
    """Return a flag per position: the position follows the end of a row."""
    chosen: _Mask = (view[places - 1] == _NEWLINE) | (places == 0)
    return chosen


def _cut(buffer: Bytes, start: int, end: int, begins: _Choice) -> Frames:
    found = _guess(buffer, start, end, begins)
    if found is None:
        found = _walk(buffer, start, end)
    starts, ends = found
    consumed = int(ends[-1]) if len(ends) else start
    needed, other = 0, None
    if end - consumed >= HEAD_BYTES:
        kind, length = _checked_head(buffer.data, consumed)
        needed = 1 + length
        if kind != b"d" and needed <= end - consumed:
            other = kind
    return Frames(MessageBatch(buffer, starts + HEAD_BYTES, ends), consumed, needed, other)


def _guess(
    buffer: Bytes, start: int, end: int, begins: _Choice
) -> tuple[Positions, Positions] | None:
    """Return start and end offsets of all CopyData frames, or None if the result is unproved.

    Args:
        begins: function that selects the heads among the positions that look like a head.
    """
    if end - start <= HEAD_BYTES:
        return None
    view = buffer[start:end]
    # The first byte of a length below 16 MB is zero. A text value contains no zero byte.
    found = []
    for block in range(0, len(view) - HEAD_BYTES, _BLOCK_BYTES):
        last = min(block + _BLOCK_BYTES, len(view) - HEAD_BYTES)
        heads = (view[block:last] == _COPY_DATA) & (view[block + 1 : last + 1] == 0)
        found.append(np.flatnonzero(heads) + block)
    places = np.concatenate(found)
    places = places[begins(view, places)]
    if len(places) == 0 or places[0] != 0:
        return None
    lengths = (
        (view[places + 2].astype(np.int64) << 16)
        | (view[places + 3].astype(np.int64) << 8)
        | view[places + 4]
    )
    ends = places + 1 + lengths
    if not np.array_equal(ends[:-1], places[1:]):
        return None
    if lengths[-1] < 4:
        # No frame is this short: the walk raises the error.
        return None
    if ends[-1] > len(view):
        places, ends = places[:-1], ends[:-1]
    elif len(view) - ends[-1] > HEAD_BYTES and view[ends[-1]] == _COPY_DATA:
        # The search does not find messages of 16 MB or more, nor payloads of another kind.
        return None
    return places + start, ends + start


def _walk(buffer: Bytes, start: int, end: int) -> tuple[Positions, Positions]:
    data = buffer.data
    starts, ends = [], []
    position = start
    while end - position >= HEAD_BYTES:
        kind, length = _checked_head(data, position)
        if kind != b"d" or position + 1 + length > end:
            break
        starts.append(position)
        position += 1 + length
        ends.append(position)
    return np.array(starts, np.int64), np.array(ends, np.int64)


def _checked_head(buffer: memoryview, position: int) -> tuple[bytes, int]:
    kind, length = _head(buffer, position)
    if not 4 <= length < 2**31:
        raise ProtocolError(
            message_type=f"{kind!r}"[2:-1], offset=1, reason=f"the length {length} is impossible"
        )
    return kind, length
