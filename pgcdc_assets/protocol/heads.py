"""The heads of a batch's messages: type, transaction and table of each message."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.frames import KEEPALIVE, XLOG_DATA, MessageBatch, Positions
from pgcdc_assets.protocol.tuples import WireBuffer

# XLogData: w (1 byte), start LSN, end LSN and time (8 bytes each), then the plugin's message. The
# first byte of the plugin's message is the action (53.4 Streaming Replication Protocol).
ACTION_AT = 25
BODY_AT = 26

BEGIN, COMMIT, INSERT, UPDATE, DELETE = b"BCIUD"
RELATION, TYPE, ORIGIN, TRUNCATE, MESSAGE = b"RYOTM"

XID_BYTES = 4

_KEEPALIVE_BYTES = 18

# Decoding a value takes about 50 bytes, and a NULL has one byte on the wire: eight megabytes of
# NULLs would take 400 MB.
MOST_VALUES = 1_000_000
_MARKER_AT, _COUNT_AT, _TUPLE_AT = BODY_AT + 4, BODY_AT + 5, BODY_AT + 7


class Heads(NamedTuple):
    """The messages of one batch, up to the window's end. Every array has one entry per message.

    Attributes:
        starts: offset of the payload.
        ends: offset behind the payload.
        bodies: offset behind the action byte, and behind the transaction id of a message in a block
            of a streamed transaction.
        actions: the plugin's action byte; 0 for a keepalive.
        begun: number of Begin messages up to and including this message, which is the index of
            the message's transaction.
        is_inside: a transaction is open after this message.
    """

    wire: WireBuffer
    starts: Positions
    ends: Positions
    bodies: Positions
    actions: npt.NDArray[np.uint8]
    begun: Positions
    is_inside: npt.NDArray[np.bool_]

    def before(self, index: int) -> Heads:
        """Return the messages before the message at `index`."""
        return Heads(
            self.wire,
            self.starts[:index],
            self.ends[:index],
            self.bodies[:index],
            self.actions[:index],
            self.begun[:index],
            self.is_inside[:index],
        )

    def check(self, is_good: npt.NDArray[np.bool_], of: Positions | slice, reason: str) -> None:
        """Raise ProtocolError for the first message of `of` whose `is_good` is false."""
        if not is_good.all():
            self.refuse(int(np.arange(len(self.starts))[of][~is_good][0]), reason)

    def refuse(self, index: int, reason: str) -> None:
        """Raise ProtocolError for the message at `index`."""
        raise ProtocolError(
            message_type=chr(self.actions[index]), offset=ACTION_AT, reason=reason
        ).at(int(self.starts[index]))


def read_heads(batch: MessageBatch, is_open: bool) -> Heads:
    """Return the heads of a batch.

    Args:
        batch: the messages.
        is_open: a transaction is open before the batch.

    Raises:
        ProtocolError: a message is neither a keepalive nor WAL data.
    """
    actions = read_actions(batch)
    begun = np.cumsum(actions == BEGIN)
    ended = np.cumsum(actions == COMMIT)
    return Heads(
        WireBuffer(batch.buffer),
        batch.starts,
        batch.ends,
        batch.starts + BODY_AT,
        actions,
        begun,
        begun - ended + int(is_open) == 1,
    )


def read_block_heads(batch: MessageBatch, xid: int | None = None) -> tuple[Heads, Positions]:
    """Return the heads of messages in a block of a streamed transaction, and transaction ids.

    In a block, the id of the transaction or subtransaction precedes the body of each message except
    Origin (proto.c). The id of an Origin or a keepalive is 0.

    Args:
        batch: the messages.
        xid: id of the transaction if the messages are between Begin Prepare and Prepare, where no
            id precedes a body; None: messages in a block.

    Raises:
        ProtocolError: a message is neither a keepalive nor WAL data, or has no transaction id.
    """
    wire, actions = WireBuffer(batch.buffer), read_actions(batch)
    has_xid = (actions != 0) & (actions != ORIGIN)
    bodies = batch.starts + BODY_AT + np.where(has_xid & (xid is None), XID_BYTES, 0)
    count = len(actions)
    heads = Heads(
        wire,
        batch.starts,
        batch.ends,
        bodies,
        actions,
        np.zeros(count, np.int64),
        np.ones(count, np.bool_),
    )
    heads.check(~has_xid | (bodies <= batch.ends), slice(None), "the message has no transaction id")
    xids = np.zeros(count, np.int64)
    xids[has_xid] = wire.uint32[batch.starts[has_xid] + BODY_AT] if xid is None else xid
    return heads, xids


def read_actions(batch: MessageBatch) -> npt.NDArray[np.uint8]:
    """Return the plugin's action byte of each message; 0 for a keepalive.

    Raises:
        ProtocolError: a message is neither a keepalive nor WAL data with an action.
    """
    starts, lengths = batch.starts, batch.ends - batch.starts
    kinds = batch.buffer[starts]
    is_keepalive = kinds == KEEPALIVE
    is_good = np.where(
        is_keepalive,
        lengths == _KEEPALIVE_BYTES,
        (kinds == XLOG_DATA) & (lengths > ACTION_AT),
    )
    if not is_good.all():
        first = np.flatnonzero(~is_good)[0]
        kind = int(kinds[first]) if lengths[first] > 0 else 0
        raise ProtocolError(
            message_type=chr(kind) if 32 < kind < 127 else f"0x{kind:02X}",
            offset=0,
            reason=f"{lengths[first]} bytes are neither a keepalive nor WAL data",
        )
    actions = batch.buffer[starts + ACTION_AT]
    unknown = np.flatnonzero(~is_keepalive & (actions == 0))
    if len(unknown):
        raise ProtocolError(
            message_type="0x00", offset=ACTION_AT, reason="the action byte is unknown"
        ).at(int(starts[unknown[0]]))
    return np.where(is_keepalive, np.uint8(0), actions)


def is_for_truncate(actions: npt.NDArray[np.uint8], index: int) -> bool:
    """Return whether a Relation message precedes a Truncate, among the actions of a batch.

    The batch does not end between the two messages (see `announcement_runs`).
    """
    for later in range(index + 1, len(actions)):
        # A keepalive has the action 0.
        if actions[later] not in (RELATION, TYPE, 0):
            return bool(actions[later] == TRUNCATE)
    return False


def split_by_values(
    batch: MessageBatch, most_values: int = MOST_VALUES, xid_bytes: int = 0
) -> Iterator[MessageBatch]:
    """Yield the messages of a batch in parts of about `most_values` column values.

    The parts share the buffer. A part exceeds the bound by less than one message.

    Args:
        batch: the messages.
        most_values: the bound.
        xid_bytes: size of the transaction ids in a block of a streamed transaction; 0 outside.
    """
    counts = _count_values(batch, xid_bytes)
    before = np.cumsum(counts) - counts
    borders = np.flatnonzero(np.diff(before // most_values)) + 1
    for first, last in pairwise([0, *borders.tolist(), len(counts)]):
        yield batch._replace(starts=batch.starts[first:last], ends=batch.ends[first:last])


def _count_values(batch: MessageBatch, xid_bytes: int) -> Positions:
    """Return the number of column values per message, from the column count of the first tuple.

    A malformed message may have any number: the decoder refuses the message.
    """
    wire = WireBuffer(batch.buffer)
    counts = np.zeros(len(batch.starts), np.int64)
    long = np.flatnonzero(batch.ends - batch.starts >= _TUPLE_AT + xid_bytes)
    actions = wire.bytes[batch.starts[long] + ACTION_AT]
    changes = long[np.isin(actions, [INSERT, UPDATE, DELETE])]
    is_update = wire.bytes[batch.starts[changes] + ACTION_AT] == UPDATE
    at = batch.starts[changes] + xid_bytes
    has_two = is_update & (wire.bytes[at + _MARKER_AT] != ord("N"))
    counts[changes] = wire.uint16[at + _COUNT_AT].astype(np.int64) * np.where(has_two, 2, 1)
    return counts


def find_context(
    batch: MessageBatch, start: int, xid_bytes: int = 0
) -> tuple[int | None, Lsn | None]:
    """Return the relation id and the commit LSN of the message at offset `start`.

    The relation id is None for a message without a tuple. The commit LSN is None if the
    transaction began in an earlier batch, and in a block of a streamed transaction. The search
    walks back to the message's Begin: use this function for error sentences only.
    """
    data = batch.buffer.data
    index = int(np.searchsorted(batch.starts, start, side="right")) - 1

    def action(number: int) -> int | None:
        first = int(batch.starts[number])
        if data[first] != XLOG_DATA or batch.ends[number] - first < BODY_AT + 8:
            return None
        return data[first + ACTION_AT]

    def body(number: int, size: int) -> int:
        first = int(batch.starts[number]) + BODY_AT
        return int.from_bytes(data[first : first + size], "big")

    relation_id = None
    if action(index) in (INSERT, UPDATE, DELETE):
        relation_id = body(index, xid_bytes + 4) & 0xFFFFFFFF
    for number in range(index, -1, -1):
        if action(number) == BEGIN:
            lsn = body(number, 8)
            return relation_id, Lsn(lsn) if lsn < 2**63 else None
    return relation_id, None
