"""The rows of a batch: changes, truncates and logical messages with their relations.

The reading is the same for whole transactions and for blocks of streamed transactions: `Heads`
knows where the bodies of the messages begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import messages
from pgcdc_assets.protocol.arrow_batch import NO_RELATION
from pgcdc_assets.protocol.frames import Positions
from pgcdc_assets.protocol.heads import (
    MESSAGE,
    ORIGIN,
    RELATION,
    TRUNCATE,
    TYPE,
    Heads,
)
from pgcdc_assets.protocol.logical_messages import MessageSelection
from pgcdc_assets.protocol.parked_rows import PARKED, read_or_park
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.row_messages import ChangeMessages, FoundTuples, LogicalTexts

IS_CHANGE = np.zeros(256, np.bool_)
IS_CHANGE[list(b"IUD")] = True
IS_RARE = np.zeros(256, np.bool_)
IS_RARE[[RELATION, TYPE, ORIGIN, TRUNCATE, MESSAGE]] = True


NOT_TRANSACTIONAL = "non-transactional logical message, not landed"
OLD_UNCHANGED = "unchanged TOAST in an old tuple, landed as NULL"


class AnnouncedRelation(NamedTuple):
    """A relation announced in the middle of a batch."""

    message: int
    relation_id: int
    relation_index: int


class Extra(NamedTuple):
    """A row of a Truncate or a Message."""

    message: int
    relation_index: int
    texts: LogicalTexts | None


class BatchRows(NamedTuple):
    """The rows of a batch. The first three attributes have one entry per row.

    Attributes:
        messages: index of the row's message.
        operations: the action byte, or PARKED.
        relations: index of the row's relation version, or NO_RELATION.
        found: the tuples.
        parked: row numbers of parked rows.
    """

    messages: Positions
    operations: npt.NDArray[np.uint8]
    relations: Positions
    found: FoundTuples
    parked: Positions


def read_message(heads: Heads, index: int) -> bytes:
    """Return the message at `index` from its action byte on, without a transaction id."""
    body = heads.wire.bytes[heads.bodies[index] : heads.ends[index]].tobytes()
    return bytes((int(heads.actions[index]),)) + body


def read_rare(heads: Heads, read_one: Callable[[int, int, bytes], None]) -> None:
    """Call `read_one` with index, action and bytes of each rare message.

    Raises:
        ProtocolError: an error of `read_one`, with the message's place.
    """
    for index in np.flatnonzero(IS_RARE[heads.actions]).tolist():
        try:
            read_one(index, int(heads.actions[index]), read_message(heads, index))
        except ProtocolError as error:
            raise error.at(int(heads.starts[index])) from None


def read_truncate(
    heads: Heads, index: int, data: bytes, relation_indexes: Mapping[int, int]
) -> list[Extra]:
    """Return the rows of a Truncate, one per table."""
    if not heads.is_inside[index]:
        heads.refuse(index, "a change outside a transaction")
    extras = []
    for relation_id in messages.parse_truncate(data).relation_ids:
        if relation_id not in relation_indexes:
            heads.refuse(index, f"relation {relation_id} was never announced")
        extras.append(Extra(index, relation_indexes[relation_id], None))
    return extras


def read_logical_message(
    heads: Heads, index: int, data: bytes, selection: MessageSelection, warnings: Counter[str]
) -> list[Extra]:
    """Return the row of a Message, or no row; count a message that is not landed, if unasked."""
    message = messages.parse_logical_message(data)
    if not message.is_transactional:
        warnings[NOT_TRANSACTIONAL] += 1
        return []
    if not selection.selects(message, data):
        return []
    if not heads.is_inside[index]:
        heads.refuse(index, "a transactional message outside a transaction")
    texts = LogicalTexts.of(message, data, int(heads.bodies[index]) - 1)
    return [Extra(index, NO_RELATION, texts)]


def find_relations(
    heads: Heads,
    changes: Positions,
    before: Mapping[int, int],
    after: Mapping[int, int],
    announcements: list[AnnouncedRelation],
) -> Positions:
    """Return the index of each change's relation version.

    Args:
        heads: the messages.
        changes: indexes of the Insert, Update and Delete messages.
        before: index by relation id at the start of the batch.
        after: index by relation id at the end of the batch.
        announcements: announcements within the batch; an announcement is valid for the messages
            after the announcement.
    """
    body = heads.bodies[changes]
    heads.check(body + 4 <= heads.ends[changes], changes, "the message names no relation")
    wanted = heads.wire.uint32[body].astype(np.int64)
    known = np.array(sorted(after), np.int64)
    if len(changes) and len(known) == 0:
        heads.refuse(int(changes[0]), f"relation {wanted[0]} was never announced")
    places = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    relation_indexes = np.array([before.get(int(i), NO_RELATION) for i in known], np.int64)[places]
    for announcement in announcements:
        first = int(np.searchsorted(changes, announcement.message))
        is_meant = places[first:] == np.searchsorted(known, announcement.relation_id)
        relation_indexes[first:][is_meant] = announcement.relation_index
    is_known = (known[places] == wanted) & (relation_indexes != NO_RELATION)
    if not is_known.all():
        first = int(np.flatnonzero(~is_known)[0])
        heads.refuse(int(changes[first]), f"relation {wanted[first]} was never announced")
    return relation_indexes


def read_rows(
    heads: Heads,
    changes: Positions,
    relation_indexes: Positions,
    column_counts: Positions,
    extras: list[Extra],
) -> BatchRows | None:
    """Return the rows of a batch in stream order; None without a row.

    Args:
        heads: the messages.
        changes: indexes of the Insert, Update and Delete messages.
        relation_indexes: index of each change's relation version.
        column_counts: number of columns of each relation version.
        extras: the rows of other messages.
    """
    row_messages, relations = changes, relation_indexes
    row_numbers, extra_rows = np.arange(len(changes)), np.empty(0, np.int64)
    if extras:
        row_messages = np.concatenate((changes, [extra.message for extra in extras]))
        order = np.argsort(row_messages, kind="stable")
        row_messages = row_messages[order]
        relations = np.concatenate((relations, [extra.relation_index for extra in extras]))[order]
        numbers = np.argsort(order)
        row_numbers, extra_rows = numbers[: len(changes)], numbers[len(changes) :]
    if len(row_messages) == 0:
        return None
    found, parked = read_or_park(
        heads.wire,
        ChangeMessages(
            heads.bodies[changes],
            heads.ends[changes],
            heads.actions[changes],
            row_numbers,
            column_counts[relation_indexes] if len(relation_indexes) else relation_indexes,
        ),
        len(row_messages),
        {
            int(row): extra.texts
            for row, extra in zip(extra_rows, extras, strict=True)
            if extra.texts is not None
        },
    )
    operations = heads.actions[row_messages]
    operations[parked] = PARKED
    return BatchRows(row_messages, operations, relations, found, parked)


def count_values(
    rows: BatchRows,
    relations: Sequence[Relation],
    is_counted: npt.NDArray[np.bool_] | None = None,
) -> Counter[str]:
    """Return the counts of values and rows that are not landed as sent, by table.

    Args:
        rows: the rows.
        relations: the relation versions that the rows index.
        is_counted: a flag per row; None: count all rows.
    """
    counts: Counter[str] = Counter()
    for numbers, description in (
        (rows.found.rescued, "values that are not UTF-8, landed as hex"),
        (rows.parked, "rows that cannot be decoded, parked with their bytes"),
    ):
        counted = numbers if is_counted is None else numbers[is_counted[numbers]]
        found = np.unique(rows.relations[counted], return_counts=True)
        for relation, count in zip(*found, strict=True):
            counts[f"{relations[relation].qualified_name}: {description}"] += int(count)
    return counts
