"""The old and new tuples of a batch's Insert, Update and Delete messages.

Layouts (53.9 Logical Replication Message Formats; proto.c, logicalrep_write_update):

    I  relation  N tuple
    U  relation  [K|O tuple]  N tuple
    D  relation  K|O tuple

The old tuples are read first, because the new tuple begins at the end of the old tuple.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc_assets.protocol import tuples, utf8
from pgcdc_assets.protocol.frames import Positions
from pgcdc_assets.protocol.heads import BODY_AT, DELETE, INSERT, UPDATE
from pgcdc_assets.protocol.messages import LogicalMessage
from pgcdc_assets.protocol.tuples import TEXTS_TYPE, Values, WireBuffer

_KEY, _OLD, _NEW = b"KON"

_MARKER_AT = 4
_TUPLE_AT = 5


class MalformedRows(Exception):
    """Messages that break one rule of their layout.

    Attributes:
        indexes: indexes of the messages among the read messages.
        offsets: offset of each fault in its message.
        reason: the sentence for the user.
    """

    def __init__(self, indexes: Positions, offsets: Positions, reason: str) -> None:
        super().__init__(reason)
        self.indexes = indexes
        self.offsets = offsets
        self.reason = reason


class ChangeMessages(NamedTuple):
    """The Insert, Update and Delete messages of a batch. Every array has one entry per message.

    Attributes:
        bodies: offset of the relation id.
        ends: offset behind the message.
        actions: I, U or D.
        rows: number of the message's row in the batch.
        column_counts: number of columns of the message's relation.
    """

    bodies: Positions
    ends: Positions
    actions: npt.NDArray[np.uint8]
    rows: Positions
    column_counts: Positions

    def choose(self, chosen: Positions) -> ChangeMessages:
        """Return the messages at the indexes `chosen`."""
        return ChangeMessages(
            self.bodies[chosen],
            self.ends[chosen],
            self.actions[chosen],
            self.rows[chosen],
            self.column_counts[chosen],
        )


class LogicalTexts(NamedTuple):
    """The two texts of a row without a tuple: prefix and content of a logical message.

    Attributes:
        prefix: start and end offset in the buffer.
        content: start and end offset in the buffer.
        written: the two texts as strings if they are not the received bytes; else None.
    """

    prefix: tuple[int, int]
    content: tuple[int, int]
    written: tuple[str, str] | None

    @classmethod
    def of(cls, message: LogicalMessage, data: bytes, start: int) -> LogicalTexts:
        """Return the texts of a message whose action byte has the offset `start`."""
        parts = data[slice(*message.prefix)], data[slice(*message.content)]
        prefix, content = map(utf8.text_of_bytes, parts)
        is_text = (prefix.encode(), content.encode()) == parts
        written = None if is_text else (prefix, content)
        first, second = message.prefix, message.content
        return cls(
            (start + first[0], start + first[1]), (start + second[0], start + second[1]), written
        )


class FoundTuples(NamedTuple):
    """The tuples of a batch. The first four attributes have one entry per row.

    Attributes:
        old_kinds: K, O, or 0 without an old tuple.
        old: texts of the old tuple, of type TEXTS_TYPE.
        new: texts of the new tuple, of type TEXTS_TYPE.
        unchanged: positions of unchanged TOAST values in `new`, of type UNCHANGED_TYPE.
        old_unchanged: number of unchanged TOAST values in old tuples. Postgres sends none.
        rescued: row number of each value that is not UTF-8, with repetitions.
    """

    old_kinds: npt.NDArray[np.uint8]
    old: pa.Array
    new: pa.Array
    unchanged: pa.Array
    old_unchanged: int
    rescued: Positions


def read_tuples(
    wire: WireBuffer,
    changes: ChangeMessages,
    row_count: int,
    logical: Mapping[int, LogicalTexts],
) -> FoundTuples:
    """Return all tuples of a batch, and the texts of its logical messages.

    Args:
        wire: the received bytes.
        changes: the Insert, Update and Delete messages.
        row_count: number of rows of the batch, logical messages and truncates included.
        logical: logical messages by row number; prefix and content become the two values of `new`.

    Raises:
        MalformedRows: messages do not follow their layout.
    """
    # The shortest message: relation id (4 bytes), marker (1 byte), column count (2 bytes).
    is_whole = changes.bodies + _TUPLE_AT + 2 <= changes.ends
    _check(is_whole, changes, changes.bodies + _MARKER_AT, "the message ends before its tuple")
    markers = wire.bytes[changes.bodies + _MARKER_AT]
    has_old = (markers == _KEY) | (markers == _OLD)
    is_good = np.where(
        changes.actions == INSERT,
        markers == _NEW,
        has_old | ((changes.actions == UPDATE) & (markers == _NEW)),
    )
    _check(is_good, changes, changes.bodies + _MARKER_AT, "the tuple marker is wrong")

    olds = np.flatnonzero(has_old)
    old_kinds = np.zeros(row_count, np.uint8)
    old_kinds[changes.rows[olds]] = markers[olds]
    new_at = changes.bodies + _TUPLE_AT
    old_values = Values.empty(_counts(row_count, changes, olds))
    if len(olds):
        new_at[olds] = _walk(wire, old_values, changes, olds, new_at[olds])

    is_delete = changes.actions == DELETE
    followed = np.flatnonzero(has_old & ~is_delete)
    if len(followed):
        at = new_at[followed]
        is_new = (at < changes.ends[followed]) & (wire.bytes[at] == _NEW)
        _check(is_new, changes, at, "no new tuple follows the old tuple", followed)
        new_at[followed] += 1

    news = np.flatnonzero(~is_delete)
    counts = _counts(row_count, changes, news)
    counts[list(logical)] = 2
    new_values = Values.empty(counts)
    if len(news):
        new_at[news] = _walk(wire, new_values, changes, news, new_at[news])
    _check(new_at == changes.ends, changes, new_at, "bytes follow the last tuple")
    for row, texts in logical.items():
        _place(new_values, int(new_values.offsets[row]), texts)

    has_new = counts > 0
    has_new[changes.rows[news]] = True
    has_old_row = old_kinds != 0
    old, old_rescued = pa.nulls(row_count, TEXTS_TYPE), np.empty(0, np.int64)
    if len(olds):
        old, old_rescued = tuples.texts(wire, old_values, has_old_row)
    new, new_rescued = tuples.texts(wire, new_values, has_new)
    return FoundTuples(
        old_kinds,
        old,
        _with_hex(new, logical),
        tuples.unchanged_columns(new_values),
        int((old_values.kinds == tuples.UNCHANGED).sum()),
        np.concatenate((old_rescued, new_rescued)),
    )


def _counts(row_count: int, changes: ChangeMessages, chosen: Positions) -> Positions:
    counts = np.zeros(row_count, np.int64)
    counts[changes.rows[chosen]] = changes.column_counts[chosen]
    return counts


def _walk(
    wire: WireBuffer,
    values: Values,
    changes: ChangeMessages,
    chosen: Positions,
    positions: Positions,
) -> Positions:
    part = changes.choose(chosen)
    try:
        return tuples.walk(wire, values, part.rows, positions, part.ends)
    except tuples.MalformedTuples as error:
        raise _malformed(changes, chosen[error.indexes], error.positions, error.reason) from None


def _check(
    is_good: npt.NDArray[np.bool_],
    changes: ChangeMessages,
    at: Positions,
    reason: str,
    chosen: Positions | None = None,
) -> None:
    """Raise MalformedRows if a flag is false.

    Args:
        is_good: a flag per message, or per chosen message.
        changes: the messages.
        at: offset in the buffer of each message's checked field.
        reason: the sentence for the user.
        chosen: indexes of the checked messages; None: all messages.
    """
    if not is_good.all():
        bad = np.flatnonzero(~is_good)
        raise _malformed(changes, bad if chosen is None else chosen[bad], at[bad], reason)


def _malformed(
    changes: ChangeMessages, indexes: Positions, positions: Positions, reason: str
) -> MalformedRows:
    return MalformedRows(indexes, positions - changes.bodies[indexes] + BODY_AT, reason)


def _place(values: Values, first: int, texts: LogicalTexts) -> None:
    for index, (start, end) in enumerate((texts.prefix, texts.content), first):
        values.starts[index], values.ends[index] = start, end
        values.kinds[index] = tuples.TEXT
        if texts.written is not None:
            values.ends[index] = start


def _with_hex(new: pa.Array, logical: Mapping[int, LogicalTexts]) -> pa.Array:
    """Replace the values of logical messages that are not UTF-8."""
    replaced = {row: texts.written for row, texts in logical.items() if texts.written is not None}
    if not replaced:
        return new
    pieces, done = [], 0
    for row in sorted(replaced):
        pieces += [new.slice(done, row - done), pa.array([replaced[row]], TEXTS_TYPE)]
        done = row + 1
    return pa.concat_arrays([*pieces, new.slice(done)])
