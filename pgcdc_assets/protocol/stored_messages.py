"""Conversion of a stream's messages whose texts have the encoding of the database.

The converted messages are those that the server sends to a client of UTF-8, so decoders know one
encoding only. Values that have no form in UTF-8 differ: they become hex (see `encodings`). Only a
stream that the server has ended at such a value is read in this way, so messages with other
characters than ASCII are converted one by one.

Neither the server nor this module converts the content of a logical message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pgcdc_assets.protocol import utf8
from pgcdc_assets.protocol.encodings import StoredEncoding
from pgcdc_assets.protocol.frames import XLOG_DATA, MessageBatch
from pgcdc_assets.protocol.heads import ACTION_AT, XID_BYTES
from pgcdc_assets.protocol.transaction_messages import STREAM_START, STREAM_STOP

# Bytes between the action byte and the global identifier of a prepared transaction.
_GID_AT = {ord("b"): 28, ord("P"): 29, ord("K"): 29, ord("r"): 37, ord("p"): 29}
# Bytes between the action byte, or the transaction id, and the first name.
_NAMES_AT = {ord("R"): 4, ord("Y"): 4, ord("O"): 8, ord("M"): 9}
_HAS_XID = frozenset(b"RYMIUD")
_CONVERTED = np.zeros(256, np.bool_)
_CONVERTED[[*b"IUD", *_GID_AT, *_NAMES_AT]] = True

_RELATION_TAIL_BYTES, _COLUMN_TAIL_BYTES = 3, 8
_count = struct.Struct("!h").unpack_from
_length = struct.Struct("!i").unpack_from
_TUPLES, _TEXT, _WITHOUT_TEXT = frozenset(b"NOK"), ord("t"), frozenset(b"nu")


class _Text(NamedTuple):
    """A text of a message, from `start` to `end`; a value follows its length."""

    start: int
    end: int
    is_value: bool


class StoredMessages:
    """Converter of the messages of one stream, batch after batch.

    Args:
        encoding: the encoding of the database.
    """

    def __init__(self, encoding: StoredEncoding) -> None:
        self._encoding = encoding
        self._is_in_block = False

    def convert(self, batch: MessageBatch) -> MessageBatch:
        """Return the messages in UTF-8. A malformed message stays as it is."""
        buffer, starts, ends = batch
        if not len(starts):
            return batch
        is_data = (buffer[starts] == XLOG_DATA) & (ends - starts > ACTION_AT)
        actions = np.where(is_data, buffer[np.where(is_data, starts + ACTION_AT, 0)], 0)
        steps = (actions == STREAM_START).astype(np.int64) - (actions == STREAM_STOP)
        in_block = np.cumsum(steps) + self._is_in_block > 0
        self._is_in_block = bool(in_block[-1])
        high = np.zeros(len(buffer) + 1, np.int64)
        np.cumsum(buffer >= 0x80, out=high[1:])
        has_high = high[ends] > high[np.minimum(starts + ACTION_AT, ends)]
        chosen = np.flatnonzero(_CONVERTED[actions] & has_high)
        if not len(chosen):
            return batch
        payloads: list[bytes | memoryview] = [
            buffer.data[start:end]
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
        found = [
            (index, data := bytes(payloads[index]), _texts_of(data, bool(in_block[index])))
            for index in chosen.tolist()
        ]
        stored = [data[text.start : text.end] for _, data, texts in found for text in texts]
        converted = iter(self._encoding.convert(stored))
        for index, data, texts in found:
            payloads[index] = b"".join(self._pieces(data, texts, converted))
        return MessageBatch.of(payloads)

    def _pieces(
        self, data: bytes, texts: list[_Text], converted: Iterator[bytes]
    ) -> Iterator[bytes]:
        position = 0
        for start, end, is_value in texts:
            text = next(converted)
            if is_value:
                yield data[position : start - 4]
                yield struct.pack("!i", len(text))
            else:
                yield data[position:start]
                # A name without a form in UTF-8 stays as stored.
                text = text.removeprefix(utf8.RAW)
            yield text
            position = end
        yield data[position:]


def _texts_of(data: bytes, is_in_block: bool) -> list[_Text]:
    """Return the texts of a message in the order of their places; none of a malformed message."""
    action, position = data[ACTION_AT], ACTION_AT + 1
    if is_in_block and action in _HAS_XID:
        position += XID_BYTES
    try:
        if action in _GID_AT:
            return [_name(data, position + _GID_AT[action])]
        if action in _NAMES_AT:
            return list(_names(data, action, position + _NAMES_AT[action]))
        return list(_values(data, position + 4))
    except (ValueError, IndexError, struct.error):
        return []


def _name(data: bytes, start: int) -> _Text:
    return _Text(start, data.index(b"\0", start), False)


def _names(data: bytes, action: int, position: int) -> Iterator[_Text]:
    name = _name(data, position)
    yield name
    if action in b"OM":
        return
    name = _name(data, name.end + 1)
    yield name
    if action != ord("R"):
        return
    position = name.end + 1
    (column_count,) = _count(data, position + 1)
    position += _RELATION_TAIL_BYTES
    for _ in range(column_count):
        name = _name(data, position + 1)
        yield name
        position = name.end + 1 + _COLUMN_TAIL_BYTES


def _values(data: bytes, position: int) -> Iterator[_Text]:
    while position < len(data):
        if data[position] not in _TUPLES:
            raise ValueError
        (column_count,) = _count(data, position + 1)
        position += 3
        for _ in range(column_count):
            kind, position = data[position], position + 1
            if kind in _WITHOUT_TEXT:
                continue
            (length,) = _length(data, position)
            end = position + 4 + length
            if kind != _TEXT or length < 0 or end > len(data):
                raise ValueError
            if not data[position + 4 : end].isascii():
                yield _Text(position + 4, end, True)
            position = end
