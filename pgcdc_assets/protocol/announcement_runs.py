"""Relation messages in one batch with the message that they announce.

A decoder distinguishes the announcements before a row from those before a Truncate by the message
behind them (decision 71). The server sends both in one call, but the bytes of a connection may be
cut between any two messages.
"""

from __future__ import annotations

from pgcdc_assets.protocol.frames import KEEPALIVE, XLOG_DATA, MessageBatch
from pgcdc_assets.protocol.heads import ACTION_AT, RELATION, TYPE


class AnnouncementRuns:
    """The batches of one stream, cut so that none ends with an announcement.

    The announcements at the end of a batch wait for the next batch. They belong to an open
    transaction, so no window ends behind them.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def complete(self, batch: MessageBatch) -> list[MessageBatch]:
        """Return the messages up to the last one that is no announcement; none if there is none."""
        end = count = len(batch.starts)
        has_announcement = bool(self._held)
        while end > 0 and (_is_announcement(batch, end - 1) or _is_keepalive(batch, end - 1)):
            has_announcement |= _is_announcement(batch, end - 1)
            end -= 1
        if not has_announcement:
            return [batch]
        # Keepalives alone wait for nothing.
        if not any(_is_announcement(batch, index) for index in range(end, count)) and end > 0:
            end = count
        begin, found = 0, []
        if self._held and end > 0:
            # Copy only what joins the two batches, up to the announced message.
            while _is_announcement(batch, begin) or _is_keepalive(batch, begin):
                begin += 1
            begin += 1
            found.append(MessageBatch.of(self._held + _payloads(batch, 0, begin)))
            self._held = []
        if begin < end:
            found.append(batch._replace(starts=batch.starts[begin:end], ends=batch.ends[begin:end]))
        self._held += _payloads(batch, end, count)
        return found


def _payloads(batch: MessageBatch, first: int, last: int) -> list[bytes]:
    return [
        batch.buffer[start:end].tobytes()
        for start, end in zip(batch.starts[first:last], batch.ends[first:last], strict=True)
    ]


def _is_announcement(batch: MessageBatch, index: int) -> bool:
    start, end = int(batch.starts[index]), int(batch.ends[index])
    if end - start <= ACTION_AT or batch.buffer[start] != XLOG_DATA:
        return False
    return int(batch.buffer[start + ACTION_AT]) in (RELATION, TYPE)


def _is_keepalive(batch: MessageBatch, index: int) -> bool:
    start = int(batch.starts[index])
    return start < int(batch.ends[index]) and int(batch.buffer[start]) == KEEPALIVE
