"""From pgoutput's messages to the raw zone's rows, a batch at a time and without a loop over rows.

The decoder does no I/O. It is given the payloads of CopyData messages in stream order and gives
back one Arrow batch of the changes in them. What it carries from one batch to the next is small:
the open transaction, the next ordinal in it, and the relations announced so far.

A transaction's rows follow its Begin, and protocol version 1 sends whole transactions one after the
other; so a row's transaction is the last Begin before it. Begin, Commit, insert, update and delete
have fixed layouts around their tuples and are read by numpy for the whole batch; Relation, Type,
Origin, Truncate and Message are rare and are read one by one.

The window ends at the first Begin with `final_lsn >= window_end`, or at a keepalive between
transactions whose position has reached `window_end`: everything the server has to send below that
position came before it. A keepalive inside a transaction ends nothing. Positions in the heads of
XLogData are not read at all: they are not monotonic, and 0/0 for some messages.
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
from pgcdc_assets.protocol.frames import KEEPALIVE, XLOG_DATA, MessageBatch, Positions
from pgcdc_assets.protocol.heads import ACTION_AT, BEGIN, BODY_AT, COMMIT, Heads, find_context
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.row_messages import ChangeMessages, LogicalTexts, read_tuples
from pgcdc_assets.protocol.tuples import WireBuffer

Resolve = Callable[[Relation, Lsn, int], tuple[Relation, int]]

_RELATION, _TYPE, _ORIGIN, _TRUNCATE, _MESSAGE = b"RYOTM"

_KEEPALIVE_BYTES = 18
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
    slot: int


class _Extra(NamedTuple):
    """A row that is no insert, update or delete."""

    message: int
    slot: int
    texts: LogicalTexts | None


class Decoder:
    """Decodes the stream of one window.

    Args:
        resolve: completes an announced relation, and numbers its version; called with the commit
            LSN and the id of the transaction in which it was announced.
        window_end: transactions that commit at or above it belong to a later window.
        window_start: transactions that commit below it were landed before and are dropped.

    Attributes:
        is_finished: the window's end was seen; what follows is not decoded.
        warnings: how often something was seen that cannot be landed, by its description.
    """

    def __init__(self, resolve: Resolve, window_end: int, window_start: int = 0) -> None:
        self._resolve = resolve
        self._window_start = int(window_start)
        self._window_end = int(window_end)
        self._announced: list[arrow_batch.Announced] = []
        self._slots: dict[int, int] = {}
        zero = np.zeros(1, np.int64)
        self._open = arrow_batch.Transactions(zero, zero, zero, [None])
        self._is_open = False
        self._next_ordinal = 0
        self.is_finished = False
        self.warnings: Counter[str] = Counter()

    def decode(self, batch: MessageBatch) -> pa.RecordBatch | None:
        """Decode the next messages; None when they hold no row of the window.

        Raises:
            ProtocolError: the messages break the protocol. The decoder cannot be used any more.
        """
        if self.is_finished or len(batch.starts) == 0:
            return None
        try:
            return self._decode(batch)
        except ProtocolError as error:
            raise self._named(error, batch) from None

    def _decode(self, batch: MessageBatch) -> pa.RecordBatch | None:
        heads = self._read_heads(batch)
        heads, transactions = self._read_transactions(heads)
        if len(heads.starts) == 0:
            return None
        heads.check(
            _IS_KNOWN[heads.actions] | (heads.actions == 0), slice(None), "its action is unknown"
        )
        changes = np.flatnonzero(_IS_CHANGE[heads.actions])
        heads.check(heads.is_inside[changes], changes, "a change outside a transaction")
        before = dict(self._slots)
        events, extras = self._read_rare(heads, transactions)
        slots = self._find_relations(heads, changes, before, events)
        return self._build(heads, transactions, changes, slots, extras)

    def _named(self, error: ProtocolError, batch: MessageBatch) -> ProtocolError:
        """Add the table and the transaction of the message that an error is about."""
        if error.start is None:
            return error
        relation_id, commit_lsn = find_context(batch, error.start)
        if commit_lsn is None and self._is_open:
            commit_lsn = Lsn(int(self._open.commit_lsns[-1]))
        slot = self._slots.get(relation_id or 0)
        relation = None if slot is None else self._announced[slot].relation.qualified_name
        return error.of(relation or relation_id, commit_lsn)

    def _read_heads(self, batch: MessageBatch) -> Heads:
        wire = WireBuffer(batch.buffer)
        starts, ends = batch.starts, batch.ends
        kinds, lengths = wire.bytes[starts], ends - starts
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
        actions = np.where(is_keepalive, np.uint8(0), wire.bytes[starts + ACTION_AT])
        begun = np.cumsum(actions == BEGIN)
        ended = np.cumsum(actions == COMMIT)
        return Heads(wire, starts, ends, actions, begun, begun - ended + int(self._is_open) == 1)

    def _read_transactions(self, heads: Heads) -> tuple[Heads, arrow_batch.Transactions]:
        """Read Begins and Commits, and leave out what lies behind the window's end."""
        marks = np.flatnonzero((heads.actions == BEGIN) | (heads.actions == COMMIT))
        is_begin = heads.actions[marks] == BEGIN
        was_open = np.concatenate(([self._is_open], is_begin[:-1]))
        heads.check(is_begin != was_open, marks, "Begin and Commit do not come in turns")
        lengths = (heads.ends - heads.starts)[marks]
        heads.check(
            lengths == np.where(is_begin, _BEGIN_BYTES, _COMMIT_BYTES), marks, "its length is wrong"
        )
        begins, commits = marks[is_begin], marks[~is_begin]
        body = heads.starts[begins] + BODY_AT
        lsns = heads.wire.uint64[body].astype(np.int64)
        previous = np.concatenate((self._open.commit_lsns, lsns))[:-1]
        heads.check(lsns > previous, begins, "commit LSNs do not rise")
        times = heads.wire.uint64[body + 8].astype(np.int64) + messages.POSTGRES_EPOCH_US
        is_time = (times >= messages.FIRST_TIME_US) & (times <= messages.LAST_TIME_US)
        heads.check(is_time, begins, "its commit time is not in the years 1 to 9999")
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
            "it does not commit the open transaction",
        )
        end = self._find_end(heads, begins, lsns)
        if end is None:
            return heads, transactions
        self.is_finished = True
        return heads.before(end), transactions

    def _find_end(self, heads: Heads, begins: Positions, lsns: Positions) -> int | None:
        """Find the message at which the window ends."""
        keepalives = np.flatnonzero((heads.actions == 0) & ~heads.is_inside)
        positions = heads.wire.uint64[heads.starts[keepalives] + 1]
        # A position no WAL can have proves nothing.
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
            self._slots[announced.relation.relation_id] = len(self._announced)
            events.append(_Event(index, announced.relation.relation_id, len(self._announced)))
            self._announced.append(announced)
        elif action == _TYPE:
            # The catalog says more about a type than this message: nothing to keep.
            messages.parse_type(data)
        elif action == _ORIGIN:
            if not is_inside:
                heads.refuse(index, "an origin outside a transaction")
            transactions.origins[transaction] = messages.parse_origin(data)
        elif action == _TRUNCATE:
            if not is_inside:
                heads.refuse(index, "a change outside a transaction")
            for relation_id in messages.parse_truncate(data).relation_ids:
                if relation_id not in self._slots:
                    heads.refuse(index, f"relation {relation_id} was never announced")
                extras.append(_Extra(index, self._slots[relation_id], None))
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
        """Find which announced relation each change's tuple has.

        Args:
            before: slots of the relations known when the batch began.
            events: announcements within the batch; each holds for the messages after it.
        """
        body = heads.starts[changes] + BODY_AT
        # Relation, marker and column count: the least that a change has.
        heads.check(body + 7 <= heads.ends[changes], changes, "it ends before its tuple")
        wanted = heads.wire.uint32[body].astype(np.int64)
        known = np.array(sorted(self._slots), np.int64)
        if len(changes) and len(known) == 0:
            heads.refuse(int(changes[0]), f"relation {wanted[0]} was never announced")
        places = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
        slots = np.array([before.get(int(i), arrow_batch.NO_RELATION) for i in known], np.int64)[
            places
        ]
        for event in events:
            first = int(np.searchsorted(changes, event.message))
            is_meant = places[first:] == np.searchsorted(known, event.relation_id)
            slots[first:][is_meant] = event.slot
        is_known = (known[places] == wanted) & (slots != arrow_batch.NO_RELATION)
        if not is_known.all():
            first = int(np.flatnonzero(~is_known)[0])
            heads.refuse(int(changes[first]), f"relation {wanted[first]} was never announced")
        return slots

    def _build(
        self,
        heads: Heads,
        transactions: arrow_batch.Transactions,
        changes: Positions,
        slots: Positions,
        extras: list[_Extra],
    ) -> pa.RecordBatch | None:
        row_messages, relations = changes, slots
        row_numbers = np.arange(len(changes))
        extra_rows = np.empty(0, np.int64)
        if extras:
            row_messages = np.concatenate((changes, [extra.message for extra in extras]))
            order = np.argsort(row_messages, kind="stable")
            row_messages = row_messages[order]
            relations = np.concatenate((slots, [extra.slot for extra in extras]))[order]
            numbers = np.argsort(order)
            row_numbers, extra_rows = numbers[: len(changes)], numbers[len(changes) :]
        transaction = heads.begun[row_messages]
        ordinals = self._ordinals(transaction)
        self._carry(heads, transactions, transaction)
        if len(row_messages) == 0:
            return None
        column_counts = np.array([len(a.relation.columns) for a in self._announced], np.int64)
        found = read_tuples(
            heads.wire,
            ChangeMessages(
                heads.starts[changes] + BODY_AT,
                heads.ends[changes],
                heads.actions[changes],
                row_numbers,
                column_counts[slots] if len(slots) else slots,
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
        self._count_rescued(relations[found.rescued])
        decoded = arrow_batch.build(
            arrow_batch.Rows(
                transaction,
                ordinals,
                heads.actions[row_messages],
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
            # Rising LSNs: what was landed before lies in front.
            decoded = decoded.slice(int(np.searchsorted(commit_lsns, self._window_start)))
        return decoded if decoded.num_rows else None

    def _count_rescued(self, relations: Positions) -> None:
        """Count values that are not UTF-8 by their tables."""
        for relation, count in zip(*np.unique(relations, return_counts=True), strict=True):
            name = self._announced[relation].relation.qualified_name
            self.warnings[f"{name}: values that are not UTF-8, landed as hex"] += int(count)

    def _ordinals(self, transaction: Positions) -> Positions:
        """Number the rows of each transaction, going on where the last batch stopped."""
        ordinals = np.arange(len(transaction)) - np.searchsorted(transaction, transaction)
        ordinals[transaction == 0] += self._next_ordinal
        return ordinals

    def _carry(
        self, heads: Heads, transactions: arrow_batch.Transactions, transaction: Positions
    ) -> None:
        """Keep what the next batch needs of this one."""
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
