"""Logical messages (`pg_logical_emit_message`): which are landed, and the non-transactional ones.

A transactional message is a row of its transaction. A non-transactional message has no commit: the
server sends the message when the decoding reaches its record, between two transactions, also if the
transaction that wrote the record is rolled back. The server sends the message again to a stream
that starts at or below the start of the record, and skips the message otherwise (logicalmsg_decode
in src/backend/replication/logical/decode.c).

**Position.** The message names the LSN of the end of its record. Its position is the last byte of
the record. A commit LSN is the start of a record, and records start at multiples of 8: so no commit
has this position, and the order of positions is the order of the stream.

**Window.** The start of the record decides whether a stream from the window's end receives the
message again, but the length of the record is known approximately only. A message whose record may
start before the window's end therefore belongs to the window. If the record also ends behind the
window's end, the position is the window's last byte, and a later stream may send the message again:
`landed_through`, which the commit of the window stores, tells that the message is landed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import utf8
from pgcdc_assets.protocol.arrow_batch import DECODED
from pgcdc_assets.protocol.empty_batches import HEARTBEAT_PREFIX
from pgcdc_assets.protocol.frames import Bytes, MessageBatch, Positions
from pgcdc_assets.protocol.heads import ACTION_AT, BODY_AT, MESSAGE
from pgcdc_assets.protocol.messages import (
    LogicalMessage,
    MessageReader,
    check_time,
    parse_logical_message,
)

# The transaction id of a message without a transaction.
NO_TRANSACTION = 0

_LSN_AT, _SENT_AT = 1, 17
_UNIX_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

# The parts of a record beside prefix and content (xlogrecord.h, message.h): head 24, data head 5,
# origin 3, top-level transaction 5, xl_logical_message 24, alignment 7.
_RECORD_BYTES = 68
# WAL pages have 1 KB at least, and heads of up to 40 bytes.
_LEAST_PAGE_BYTES, _PAGE_HEAD_BYTES = 1024, 40


@dataclass(frozen=True)
class MessageSelection:
    """Which logical messages are landed. Heartbeats of this package always are.

    Attributes:
        prefixes: the prefixes of the messages; None: every prefix.
        non_transactional: land non-transactional messages; otherwise count them only.
    """

    prefixes: frozenset[bytes] | None = None
    non_transactional: bool = False

    def selects(self, message: LogicalMessage, data: bytes) -> bool:
        """Return whether a message has one of the prefixes."""
        if self.prefixes is None:
            return True
        prefix = data[slice(*message.prefix)]
        return prefix in self.prefixes or prefix == HEARTBEAT_PREFIX.encode()


EVERY_MESSAGE = MessageSelection()


class NonTransactionalMessages:
    """The non-transactional messages of a stream, window by window.

    Args:
        selection: the messages to land.
        landed_through: end of the record of the last message that an earlier stream has landed.

    Attributes:
        selection: the same.
        landed_through: the same, with the messages of this stream.
    """

    def __init__(
        self, selection: MessageSelection = EVERY_MESSAGE, landed_through: int = 0
    ) -> None:
        self.selection = selection
        self.landed_through = landed_through
        self._rows: list[tuple[int, int, dt.datetime, list[str]]] = []
        self._found = np.empty(0, np.int64)

    def begin_window(self, window_end: int, window_start: int) -> None:
        """Continue with the next window of the same stream."""
        self._window_end, self._window_start = window_end, window_start
        self._rows = []
        self._last_position, self._next_ordinal = -1, 0

    def find(self, batch: MessageBatch, actions: Bytes) -> None:
        """Find the messages of a batch.

        A message in a block of a streamed transaction may be among them, because a transaction id
        precedes its flags. `leave_out` and `add` do not get the messages of a block.
        """
        self._found = np.empty(0, np.int64)
        if self.selection.non_transactional:
            found = np.flatnonzero(actions == MESSAGE)
            flags = batch.starts[found] + BODY_AT
            is_found = (flags < batch.ends[found]) & (batch.buffer[flags] & 1 == 0)
            self._found = np.asarray(found[is_found], np.int64)

    def _between(self, first: int, last: int) -> Positions:
        start, end = np.searchsorted(self._found, (first, last))
        return self._found[start:end]

    def leave_out(
        self, batch: MessageBatch, first: int, last: int
    ) -> tuple[Positions | slice, int]:
        """Return the indexes of the other messages in a range, up to the end of the window.

        Returns:
            The indexes, and the index of the first message behind the window, or `last`.

        Raises:
            ProtocolError: a message is malformed.
        """
        found = self._between(first, last)
        if len(found) == 0:
            return slice(first, last), last
        for index in found.tolist():
            message, data, _ = _parse(batch, index)
            if message.lsn - _most_record_bytes(message, data) >= self._window_end:
                last = index
                break
        return np.setdiff1d(np.arange(first, last), found, assume_unique=True), last

    def add(self, batch: MessageBatch, first: int, last: int) -> None:
        """Add the messages of a range, which belong to the window."""
        for index in self._between(first, last).tolist():
            message, data, sent_us = _parse(batch, index)
            if message.lsn <= max(self._window_start, self.landed_through):
                continue
            self.landed_through = message.lsn
            if self.selection.selects(message, data):
                self._keep(message, data, sent_us)

    def _keep(self, message: LogicalMessage, data: bytes, time_us: int) -> None:
        position = min(message.lsn, self._window_end) - 1
        ordinal = self._next_ordinal if position == self._last_position else 0
        self._last_position, self._next_ordinal = position, ordinal + 1
        texts = [utf8.text_of_bytes(data[slice(*p)]) for p in (message.prefix, message.content)]
        sent_at = _UNIX_EPOCH + dt.timedelta(microseconds=time_us)
        self._rows.append((position, ordinal, sent_at, texts))

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows since the last call, in one batch of the schema `DECODED`."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        positions, ordinals, times, texts = zip(*rows, strict=True)
        known = {
            "commit_lsn": positions,
            "ordinal": ordinals,
            "xid": [NO_TRANSACTION] * len(rows),
            "commit_ts": times,
            "op": [chr(MESSAGE)] * len(rows),
            "new": texts,
        }
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(known[each.name], each.type)
                if each.name in known
                else pa.nulls(len(rows), each.type)
                for each in DECODED
            ],
            schema=DECODED,
        )


def _parse(batch: MessageBatch, index: int) -> tuple[LogicalMessage, bytes, int]:
    """Return a message, its bytes from the action byte on, and the time at which it was sent."""
    body = int(batch.starts[index]) + ACTION_AT
    head = batch.buffer[body - ACTION_AT : body].tobytes()
    data = batch.buffer[body : batch.ends[index]].tobytes()
    try:
        message = parse_logical_message(data)
        if message.lsn != int.from_bytes(head[_LSN_AT : _LSN_AT + 8]):
            raise ProtocolError(
                message_type="M", offset=2, reason="the LSN is not the LSN of the message's head"
            )
        sent_us = int.from_bytes(head[_SENT_AT : _SENT_AT + 8], signed=True)
        return message, data, check_time(MessageReader(data), sent_us)
    except ProtocolError as error:
        raise error.at(body - ACTION_AT) from None


def _most_record_bytes(message: LogicalMessage, data: bytes) -> int:
    """Return an upper bound of the bytes of a message's record in the WAL, page heads included.

    The record has the prefix in the encoding of the database, which is at most twice as long as
    UTF-8 (EUC_JP and EUC_TW have up to four bytes for a character, UTF-8 has two or three then).
    The server does not convert the content.
    """
    start, end = message.prefix
    most = _RECORD_BYTES + len(data) + end - start
    return most + _PAGE_HEAD_BYTES * (most // (_LEAST_PAGE_BYTES - _PAGE_HEAD_BYTES) + 2)
