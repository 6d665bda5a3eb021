"""Decoding of pgoutput's messages to the raw zone's rows, by batch and without a loop over rows.

The decoder does no I/O. The input of a call is the payloads of CopyData messages in stream order.
The output is one Arrow batch of their changes. The state between two batches is small: the open
transaction, the next ordinal of the open transaction, and the relations announced so far.

Protocol version 1 sends whole transactions one after the other, each between Begin and Commit
(53.5 Logical Streaming Replication Protocol). The transaction of a row is therefore the last Begin
before the row. Begin, Commit, Insert, Update and Delete have fixed layouts around their tuples:
numpy reads these messages for the whole batch. Relation, Type, Origin, Truncate and Message are
rare: `messages` reads these one by one.

The window ends at the first Begin with `final_lsn >= window_end`. The window also ends at a
keepalive between two transactions with `wal_end >= window_end`, because the server sends a
keepalive's position only after every change below the position. A keepalive inside a transaction
does not end the window. The decoder ignores the LSNs in the header of XLogData, because these LSNs
are not monotonic and are 0/0 for some messages (src/backend/replication/walsender.c).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol import arrow_batch, messages
from pgcdc_assets.protocol.frames import MessageBatch, Positions
from pgcdc_assets.protocol.heads import (
    ACTION_AT,
    BEGIN,
    BODY_AT,
    COMMIT,
    Heads,
    find_context,
    read_heads,
)
from pgcdc_assets.protocol.parked import PARKED, ParkedRows, add_parked, read_or_park
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.row_messages import ChangeMessages, LogicalTexts

Resolve = Callable[[Relation, Lsn, int], tuple[Relation, int]]

_RELATION, _TYPE, _ORIGIN, _TRUNCATE, _MESSAGE = b"RYOTM"

_BEGIN_BYTES = BODY_AT + 20
_COMMIT_BYTES = BODY_AT + 25

_IS_CHANGE = np.zeros(256, np.bool_)
_IS_CHANGE[list(b"IUD")] = True
_IS_RARE = np.zeros(256, np.bool_)
_IS_RARE[list(b"RYOTM")] = True
_IS_KNOWN = _IS_CHANGE | _IS_RARE
_IS_KNOWN[list(b"BC")] = True

_MAX_LSN = 2**63 - 1


class _Event(NamedTuple):
    """A relation announced in the middle of a batch."""

    message: int
    relation_id: int
    relation_index: int


class _Extra(NamedTuple):
    """A row of a Truncate or a Message."""

    message: int
    relation_index: int
    texts: LogicalTexts | None


class Decoder:
    """Decoder of a stream, one window after the other.

    Args:
        resolve: function that completes an announced relation from the catalog and returns the
            relation with its version number. The arguments are the announced relation, and the
            commit LSN and the id of the transaction that announced the relation.
        window_end: LSN; transactions that commit at or above `window_end` belong to a later window.
        window_start: LSN; transactions that commit below `window_start` were landed by an earlier
            window and are dropped.

    Attributes:
        is_finished: the decoder has seen the end of the window and ignores later messages.
        rest: the messages from the window's end on in the last batch; None before the end.
        warnings: counts of messages and values that are not landed as sent, by description.
        parked: the parked rows so far, by relation id.
    """

    def __init__(self, resolve: Resolve, window_end: int, window_start: int = 0) -> None:
        self._resolve = resolve
        self._announced: list[arrow_batch.Announced] = []
        self._relation_indexes: dict[int, int] = {}
        zero = np.zeros(1, np.int64)
        self._open = arrow_batch.Transactions(zero, zero, zero, [None])
        self._is_open = False
        self._next_ordinal = 0
        self.begin_window(window_end, window_start)

    def begin_window(self, window_end: int, window_start: int) -> None:
        """Continue with the next window of the same stream. The relations stay announced.

        The server announces a relation once per stream. Decode `rest` of the last window first.
        """
        self._window_start = int(window_start)
        self._window_end = int(window_end)
        # A stream may announce a relation many times: keep the versions in use.
        self._announced = [self._announced[index] for index in self._relation_indexes.values()]
        self._relation_indexes = {oid: index for index, oid in enumerate(self._relation_indexes)}
        self.is_finished = False
        self.rest: MessageBatch | None = None
        self.warnings: Counter[str] = Counter()
        self.parked: dict[int, ParkedRows] = {}

    def decode(self, batch: MessageBatch) -> pa.RecordBatch | None:
        """Return the rows of the next messages, in the schema `arrow_batch.DECODED`.

        Return None if the messages contain no row of the window. A change whose tuples cannot be
        decoded becomes a parked row (see `parked`).

        Raises:
            ProtocolError: a message is malformed. Discard the decoder after this error.
        """
        if self.is_finished or len(batch.starts) == 0:
            return None
        try:
            return self._decode(batch)
        except ProtocolError as error:
            raise self._add_context(error, batch) from None

    def _decode(self, batch: MessageBatch) -> pa.RecordBatch | None:
        heads = read_heads(batch, self._is_open)
        heads, transactions = self._read_transactions(heads)
        if len(heads.starts) == 0:
            return None
        heads.check(
            _IS_KNOWN[heads.actions] | (heads.actions == 0),
            slice(None),
            "the action byte is unknown",
        )
        changes = np.flatnonzero(_IS_CHANGE[heads.actions])
        heads.check(heads.is_inside[changes], changes, "a change outside a transaction")
        before = dict(self._relation_indexes)
        events, extras = self._read_rare(heads, transactions)
        relation_indexes = self._find_relations(heads, changes, before, events)
        return self._build(heads, transactions, changes, relation_indexes, extras)

    def _add_context(self, error: ProtocolError, batch: MessageBatch) -> ProtocolError:
        """Return the error with the table and the transaction of the malformed message."""
        if error.start is None:
            return error
        relation_id, commit_lsn = find_context(batch, error.start)
        if commit_lsn is None and self._is_open:
            commit_lsn = Lsn(int(self._open.commit_lsns[-1]))
        index = self._relation_indexes.get(relation_id or 0)
        relation = None if index is None else self._announced[index].relation.qualified_name
        return error.of(relation or relation_id, commit_lsn)

    def _read_transactions(self, heads: Heads) -> tuple[Heads, arrow_batch.Transactions]:
        """Read the Begin and Commit messages, and drop all messages after the window's end.

        Layout of Begin: final_lsn int64, commit time int64, xid int32. Layout of Commit: flags
        int8, commit_lsn int64, end_lsn int64, commit time int64.
        """
        marks = np.flatnonzero((heads.actions == BEGIN) | (heads.actions == COMMIT))
        is_begin = heads.actions[marks] == BEGIN
        was_open = np.concatenate(([self._is_open], is_begin[:-1]))
        heads.check(is_begin != was_open, marks, "Begin and Commit do not alternate")
        lengths = (heads.ends - heads.starts)[marks]
        heads.check(
            lengths == np.where(is_begin, _BEGIN_BYTES, _COMMIT_BYTES), marks, "the length is wrong"
        )
        begins, commits = marks[is_begin], marks[~is_begin]
        body = heads.starts[begins] + BODY_AT
        lsns = heads.wire.uint64[body].astype(np.int64)
        previous = np.concatenate((self._open.commit_lsns, lsns))[:-1]
        heads.check(lsns > previous, begins, "the commit LSN is not above the last one")
        times = heads.wire.uint64[body + 8].astype(np.int64) + messages.POSTGRES_EPOCH_US
        is_time = (times >= messages.FIRST_TIME_US) & (times <= messages.LAST_TIME_US)
        heads.check(is_time, begins, "the commit time is outside the years 1 to 9999")
        transactions = arrow_batch.Transactions(
            np.concatenate((self._open.commit_lsns, lsns)),
            np.concatenate((self._open.commit_times, times)),
            np.concatenate((self._open.xids, heads.wire.uint32[body + 16].astype(np.int64))),
            self._open.origins + [None] * len(begins),
        )
        committed = heads.wire.uint64[heads.starts[commits] + BODY_AT + 1].astype(np.int64)
        heads.check(
            committed == transactions.commit_lsns[heads.begun[commits]],
            commits,
            "the commit LSN is not the LSN of the open transaction",
        )
        end = self._find_end(heads, begins, lsns)
        if end is None:
            return heads, transactions
        self.is_finished = True
        self.rest = MessageBatch(heads.wire.bytes, heads.starts[end:], heads.ends[end:])
        return heads.before(end), transactions

    def _find_end(self, heads: Heads, begins: Positions, lsns: Positions) -> int | None:
        """Return the index of the message that ends the window, or None."""
        keepalives = np.flatnonzero((heads.actions == 0) & ~heads.is_inside)
        positions = heads.wire.uint64[heads.starts[keepalives] + 1]
        # A server may send a position above every possible LSN: ignore such a keepalive.
        has_reached = (positions >= self._window_end) & (positions <= _MAX_LSN)
        ends = np.concatenate((begins[lsns >= self._window_end], keepalives[has_reached]))
        return int(ends.min()) if len(ends) else None

    def _read_rare(
        self, heads: Heads, transactions: arrow_batch.Transactions
    ) -> tuple[list[_Event], list[_Extra]]:
        events: list[_Event] = []
        extras: list[_Extra] = []
        for index in np.flatnonzero(_IS_RARE[heads.actions]).tolist():
            try:
                self._read_one(heads, transactions, index, events, extras)
            except ProtocolError as error:
                raise error.at(int(heads.starts[index])) from None
        return events, extras

    def _read_one(
        self,
        heads: Heads,
        transactions: arrow_batch.Transactions,
        index: int,
        events: list[_Event],
        extras: list[_Extra],
    ) -> None:
        start = int(heads.starts[index]) + ACTION_AT
        data = heads.wire.bytes[start : heads.ends[index]].tobytes()
        action, transaction = data[0], int(heads.begun[index])
        is_inside = bool(heads.is_inside[index])
        if action == _RELATION:
            commit_lsn = Lsn(int(transactions.commit_lsns[transaction]))
            xid = int(transactions.xids[transaction])
            announced = arrow_batch.Announced(
                *self._resolve(messages.parse_relation(data), commit_lsn, xid)
            )
            self._relation_indexes[announced.relation.relation_id] = len(self._announced)
            events.append(_Event(index, announced.relation.relation_id, len(self._announced)))
            self._announced.append(announced)
        elif action == _TYPE:
            # Check the layout only: `resolve` reads types from the catalog, in more detail.
            messages.parse_type(data)
        elif action == _ORIGIN:
            if not is_inside:
                heads.refuse(index, "an origin outside a transaction")
            transactions.origins[transaction] = messages.parse_origin(data)
        elif action == _TRUNCATE:
            if not is_inside:
                heads.refuse(index, "a change outside a transaction")
            for relation_id in messages.parse_truncate(data).relation_ids:
                if relation_id not in self._relation_indexes:
                    heads.refuse(index, f"relation {relation_id} was never announced")
                extras.append(_Extra(index, self._relation_indexes[relation_id], None))
        else:
            message = messages.parse_logical_message(data)
            if not message.is_transactional:
                self.warnings["non-transactional logical message, not landed"] += 1
            elif not is_inside:
                heads.refuse(index, "a transactional message outside a transaction")
            else:
                texts = LogicalTexts.of(message, data, start)
                extras.append(_Extra(index, arrow_batch.NO_RELATION, texts))

    def _find_relations(
        self, heads: Heads, changes: Positions, before: dict[int, int], events: list[_Event]
    ) -> Positions:
        """Return the index of each change's relation version in `_announced`.

        Args:
            before: index by relation id at the start of the batch.
            events: announcements within the batch; an announcement is valid for the messages
                after the announcement.
        """
        body = heads.starts[changes] + BODY_AT
        heads.check(body + 4 <= heads.ends[changes], changes, "the message names no relation")
        wanted = heads.wire.uint32[body].astype(np.int64)
        known = np.array(sorted(self._relation_indexes), np.int64)
        if len(changes) and len(known) == 0:
            heads.refuse(int(changes[0]), f"relation {wanted[0]} was never announced")
        places = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
        relation_indexes = np.array(
            [before.get(int(i), arrow_batch.NO_RELATION) for i in known], np.int64
        )[places]
        for event in events:
            first = int(np.searchsorted(changes, event.message))
            is_meant = places[first:] == np.searchsorted(known, event.relation_id)
            relation_indexes[first:][is_meant] = event.relation_index
        is_known = (known[places] == wanted) & (relation_indexes != arrow_batch.NO_RELATION)
        if not is_known.all():
            first = int(np.flatnonzero(~is_known)[0])
            heads.refuse(int(changes[first]), f"relation {wanted[first]} was never announced")
        return relation_indexes

    def _build(
        self,
        heads: Heads,
        transactions: arrow_batch.Transactions,
        changes: Positions,
        relation_indexes: Positions,
        extras: list[_Extra],
    ) -> pa.RecordBatch | None:
        row_messages, relations = changes, relation_indexes
        row_numbers = np.arange(len(changes))
        extra_rows = np.empty(0, np.int64)
        if extras:
            row_messages = np.concatenate((changes, [extra.message for extra in extras]))
            order = np.argsort(row_messages, kind="stable")
            row_messages = row_messages[order]
            relations = np.concatenate(
                (relation_indexes, [extra.relation_index for extra in extras])
            )[order]
            numbers = np.argsort(order)
            row_numbers, extra_rows = numbers[: len(changes)], numbers[len(changes) :]
        transaction = heads.begun[row_messages]
        ordinals = self._ordinals(transaction)
        self._carry(heads, transactions, transaction)
        if len(row_messages) == 0:
            return None
        column_counts = np.array([len(a.relation.columns) for a in self._announced], np.int64)
        found, parked = read_or_park(
            heads.wire,
            ChangeMessages(
                heads.starts[changes] + BODY_AT,
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
        if found.old_unchanged:
            self.warnings["unchanged TOAST in an old tuple, landed as NULL"] += found.old_unchanged
        self._count(relations[found.rescued], "values that are not UTF-8, landed as hex")
        self._count(relations[parked], "rows that cannot be decoded, parked with their bytes")
        operations = heads.actions[row_messages]
        operations[parked] = PARKED
        decoded = arrow_batch.build(
            arrow_batch.Rows(
                transaction,
                ordinals,
                operations,
                relations,
                found.old_kinds,
                found.old,
                found.new,
                found.unchanged,
            ),
            transactions,
            self._announced,
        )
        commit_lsns = transactions.commit_lsns[transaction]
        if commit_lsns[0] < self._window_start:
            # Commit LSNs rise, so the rows of the previous window are the first rows.
            decoded = decoded.slice(int(np.searchsorted(commit_lsns, self._window_start)))
        if len(parked):
            add_parked(self.parked, decoded)
        return decoded if decoded.num_rows else None

    def _count(self, relations: Positions, description: str) -> None:
        """Add rows or values to the warnings, by table."""
        for relation, count in zip(*np.unique(relations, return_counts=True), strict=True):
            name = self._announced[relation].relation.qualified_name
            self.warnings[f"{name}: {description}"] += int(count)

    def _ordinals(self, transaction: Positions) -> Positions:
        """Return each row's position in its transaction, continued from the last batch."""
        ordinals = np.arange(len(transaction)) - np.searchsorted(transaction, transaction)
        ordinals[transaction == 0] += self._next_ordinal
        return ordinals

    def _carry(
        self, heads: Heads, transactions: arrow_batch.Transactions, transaction: Positions
    ) -> None:
        """Keep the open transaction and its next ordinal for the next batch."""
        last = int(heads.begun[-1])
        row_count = len(transaction) - int(np.searchsorted(transaction, last))
        self._next_ordinal = row_count + (self._next_ordinal if last == 0 else 0)
        self._is_open = bool(heads.is_inside[-1])
        self._open = arrow_batch.Transactions(
            transactions.commit_lsns[last : last + 1],
            transactions.commit_times[last : last + 1],
            transactions.xids[last : last + 1],
            [transactions.origins[last]],
        )
