"""Cutting a connection's bytes into protocol messages, a whole buffer at a time.

A frame of Postgres's protocol is one type byte, four bytes of length (which count themselves) and a
payload. While a stream runs all but a handful are CopyData frames (`d`) that hold an XLogData (`w`)
or a keepalive (`k`). Following the lengths one by one in Python costs 0.4 microseconds a message,
more than decoding it. So all places that look like such a frame's head are found by numpy first,
and the guess is proved: when each place's length leads exactly to the next place, the places are
the frames and nothing else is. Only a buffer in which that fails is walked frame by frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pgcdc_assets.errors import ProtocolError

HEAD_BYTES = 5

# Readers may touch so many bytes behind a message's end: every buffer has them.
SLACK_BYTES = 16

# So many bytes and what is computed from them stay in the processor's cache.
_BLOCK_BYTES = 128 * 1024

_COPY_DATA = ord("d")
XLOG_DATA = ord("w")
KEEPALIVE = ord("k")

_head = struct.Struct("!cI").unpack_from

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]


class MessageBatch(NamedTuple):
    """Payloads of CopyData messages in stream order, all in one buffer.

    Attributes:
        buffer: at least SLACK_BYTES longer than the last message's end.
        starts: where each payload begins.
        ends: where each payload ends.
    """

    buffer: Bytes
    starts: Positions
    ends: Positions

    @classmethod
    def of(cls, payloads: Sequence[bytes | memoryview]) -> MessageBatch:
        """Join separate payloads into a batch."""
        lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
        ends = np.cumsum(lengths)
        joined = b"".join([*payloads, bytes(SLACK_BYTES)])
        return cls(np.frombuffer(joined, np.uint8), ends - lengths, ends)


class Frames(NamedTuple):
    """What a buffer holds.

    Attributes:
        batch: the CopyData payloads that are complete.
        consumed: where the first incomplete frame, or `other`, begins.
        needed: bytes that the frame at `consumed` has in all, as far as its head is there; else 0.
        other: the type of the frame at `consumed` when it is complete and no CopyData.
    """

    batch: MessageBatch
    consumed: int
    needed: int
    other: bytes | None


def cut(buffer: Bytes, start: int, end: int) -> Frames:
    """Find the frames in `buffer[start:end]`, where `start` begins a frame.

    Raises:
        ProtocolError: a length that no frame can have.
    """
    found = _guess(buffer, start, end)
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


def _guess(buffer: Bytes, start: int, end: int) -> tuple[Positions, Positions] | None:
    """Find all CopyData frames at once; None when what was found does not prove itself."""
    if end - start <= HEAD_BYTES:
        return None
    view = buffer[start:end]
    # A length below 16 MB has a zero first byte, which no text value can contain.
    found = []
    for block in range(0, len(view) - HEAD_BYTES, _BLOCK_BYTES):
        last = min(block + _BLOCK_BYTES, len(view) - HEAD_BYTES)
        heads = (view[block:last] == _COPY_DATA) & (view[block + 1 : last + 1] == 0)
        found.append(np.flatnonzero(heads) + block)
    places = np.concatenate(found)
    inner = view[places + HEAD_BYTES]
    places = places[(inner == XLOG_DATA) | (inner == KEEPALIVE)]
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
    if ends[-1] > len(view):
        places, ends = places[:-1], ends[:-1]
    elif len(view) - ends[-1] > HEAD_BYTES and view[ends[-1]] == _COPY_DATA:
        # A message of 16 MB or more, or one that is neither of the two, was not looked for.
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
            message_type=f"{kind!r}"[2:-1], offset=1, reason=f"its length of {length} is impossible"
        )
    return kind, length
