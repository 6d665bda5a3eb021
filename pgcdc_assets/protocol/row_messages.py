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

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import tuples, utf8
from pgcdc_assets.protocol.frames import Positions
from pgcdc_assets.protocol.heads import BODY_AT, DELETE, INSERT, UPDATE
from pgcdc_assets.protocol.messages import LogicalMessage
from pgcdc_assets.protocol.tuples import TEXTS_TYPE, Values, WireBuffer

_KEY, _OLD, _NEW = b"KON"

_MARKER_AT = 4
_TUPLE_AT = 5


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


class LogicalTexts(NamedTuple):
    """Prefix and content of a logical message.

    Attributes:
        prefix: start and end offset in the buffer.
        content: start and end offset in the buffer.
        hex: prefix and content as strings if one of the two is not UTF-8; else None.
    """

    prefix: tuple[int, int]
    content: tuple[int, int]
    hex: tuple[str, str] | None

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
        ProtocolError: a message does not follow its layout.
    """
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
        _check(is_new, _chosen(changes, followed), at, "no new tuple follows the old tuple")
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
    part = _chosen(changes, chosen)
    try:
        return tuples.walk(wire, values, part.rows, positions, part.ends)
    except tuples.MalformedTuple as error:
        raise _malformed(part, error.index, error.position, error.reason) from None


def _chosen(changes: ChangeMessages, chosen: Positions) -> ChangeMessages:
    return ChangeMessages(
        changes.bodies[chosen],
        changes.ends[chosen],
        changes.actions[chosen],
        changes.rows[chosen],
        changes.column_counts[chosen],
    )


def _check(
    is_good: npt.NDArray[np.bool_], changes: ChangeMessages, at: Positions, reason: str
) -> None:
    if not is_good.all():
        first = int(np.flatnonzero(~is_good)[0])
        raise _malformed(changes, first, int(at[first]), reason)


def _malformed(changes: ChangeMessages, index: int, position: int, reason: str) -> ProtocolError:
    body = int(changes.bodies[index])
    return ProtocolError(
        message_type=chr(changes.actions[index]),
        offset=position - body + BODY_AT,
        reason=reason,
    ).at(body - BODY_AT)


def _place(values: Values, first: int, texts: LogicalTexts) -> None:
    for index, (start, end) in enumerate((texts.prefix, texts.content), first):
        values.starts[index], values.ends[index] = start, end
        values.kinds[index] = tuples.TEXT
        if texts.hex is not None:
            values.ends[index] = start


def _with_hex(new: pa.Array, logical: Mapping[int, LogicalTexts]) -> pa.Array:
    """Replace the values of logical messages that are not UTF-8."""
    replaced = {row: texts.hex for row, texts in logical.items() if texts.hex is not None}
    if not replaced:
        return new
    pieces, done = [], 0
    for row in sorted(replaced):
        pieces += [new.slice(done, row - done), pa.array([replaced[row]], TEXTS_TYPE)]
        done = row + 1
    return pa.concat_arrays([*pieces, new.slice(done)])
