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
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pyarrow as pa

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol import arrow_batch, messages
from pgcdc_assets.protocol.batch_rows import (
    IS_CHANGE,
    IS_RARE,
    OLD_UNCHANGED,
    AnnouncedRelation,
    BatchRows,
    Extra,
    count_values,
    find_relations,
    read_logical_message,
    read_rare,
    read_rows,
    read_truncate,
)
from pgcdc_assets.protocol.frames import MessageBatch, Positions
from pgcdc_assets.protocol.heads import (
    BEGIN,
    BODY_AT,
    COMMIT,
    ORIGIN,
    RELATION,
    TRUNCATE,
    TYPE,
    Heads,
    find_context,
    is_for_truncate,
    read_heads,
)
from pgcdc_assets.protocol.logical_messages import EVERY_MESSAGE, MessageSelection
from pgcdc_assets.protocol.parked_rows import ParkedRows, add_parked
from pgcdc_assets.protocol.relation import Relation

# See `Decoder`.
Resolve = Callable[[Relation, Lsn, int, bool], tuple[Relation, int]]

_FEW_ANNOUNCEMENTS = 64

_BEGIN_BYTES = BODY_AT + 20
_COMMIT_BYTES = BODY_AT + 25

_IS_KNOWN = IS_CHANGE | IS_RARE
_IS_KNOWN[list(b"BC")] = True


class Decoder:
    """Decoder of a stream of whole transactions, one window after the other.

    Args:
        resolve: function that completes an announced relation from the catalog and returns the
            relation with its version number. The arguments are the announced relation, the commit
            LSN and the id of the transaction that announced the relation, and whether the
            announcement is of this transaction and right before a row.
        window_end: LSN; transactions that commit at or above `window_end` belong to a later window.
        window_start: LSN; transactions that commit below `window_start` were landed by an earlier
            window and are dropped.
        selection: the logical messages to land.

    Attributes:
        is_finished: the decoder has seen the end of the window and ignores later messages.
        rest: the messages from the window's end on in the last batch; None before the end.
        warnings: counts of messages and values that are not landed as sent, by description.
        parked: the parked rows so far, by relation id.
    """

    def __init__(
        self,
        resolve: Resolve,
        window_end: int,
        window_start: int = 0,
        selection: MessageSelection = EVERY_MESSAGE,
    ) -> None:
        self._resolve = resolve
        self._selection = selection
        self._announced: list[arrow_batch.Announced] = []
        self._relation_indexes: dict[int, int] = {}
        self._announcement_count = 0
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
        self._forget_replaced_announcements()
        self.is_finished = False
        self.rest: MessageBatch | None = None
        self.warnings: Counter[str] = Counter()
        self.parked: dict[int, ParkedRows] = {}

    def _forget_replaced_announcements(self) -> None:
        """Keep the versions of relations in use. A stream may announce a relation many times."""
        self._announced = [self._announced[index] for index in self._relation_indexes.values()]
        self._relation_indexes = {oid: index for index, oid in enumerate(self._relation_indexes)}

    @property
    def is_open(self) -> bool:
        """Whether the last message was inside a transaction."""
        return self._is_open

    @property
    def last_commit_lsn(self) -> int:
        """The commit LSN of the last transaction; 0 before the first transaction."""
        return int(self._open.commit_lsns[-1])

    def number_announcement(self) -> int:
        """Return the position of the next announcement among the announcements of the stream."""
        self._announcement_count += 1
        return self._announcement_count

    def add_streamed(self, commit_lsn: int, announced: Iterable[arrow_batch.Announced]) -> None:
        """Add the commit of a streamed transaction, between two transactions.

        After the commit, pgoutput does not announce the transaction's relations again, unless they
        were altered after their announcement (pgoutput.c, cleanup_rel_sync_cache). The later one of
        two announcements is therefore valid.
        """
        lsns = np.array([commit_lsn], np.int64)
        self._open = replace(self._open, commit_lsns=lsns)
        for each in announced:
            index = self._relation_indexes.get(each.relation.relation_id)
            if index is None or self._announced[index].number < each.number:
                self._relation_indexes[each.relation.relation_id] = len(self._announced)
                self._announced.append(each)

    @property
    def valid_announcements(self) -> list[arrow_batch.Announced]:
        """The newest announcement of each relation."""
        return [self._announced[index] for index in self._relation_indexes.values()]

    def add_prepared(self, announced: Iterable[arrow_batch.Announced]) -> None:
        """Add the relations that a prepared transaction has announced to later transactions.

        Their version is 0. A relation is completed at its first use: the catalog does not show the
        columns of the prepared transaction before its commit.
        """
        for each in announced:
            self._relation_indexes[each.relation.relation_id] = len(self._announced)
            self._announced.append(each)

    def add_completed(self, completed: Iterable[arrow_batch.Announced]) -> None:
        """Add the completed relations of those announcements that are still the newest."""
        for each in completed:
            index = self._relation_indexes.get(each.relation.relation_id)
            if index is not None and self._announced[index].number == each.number:
                self._announced[index] = each

    def decode(self, batch: MessageBatch) -> pa.RecordBatch | None:
        """Return the rows of the next messages, in the schema `arrow_batch.DECODED`.

        Return None if the messages contain no row of the window. A change whose tuples cannot be
        decoded becomes a parked row (see `parked_rows`).

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
        if len(self._announced) > 2 * len(self._relation_indexes) + _FEW_ANNOUNCEMENTS:
            # Each batch reads all announcements.
            self._forget_replaced_announcements()
        heads = read_heads(batch, self._is_open)
        heads, transactions = self._read_transactions(heads)
        if len(heads.starts) == 0:
            return None
        heads.check(
            _IS_KNOWN[heads.actions] | (heads.actions == 0),
            slice(None),
            "the action byte is unknown",
        )
        changes = np.flatnonzero(IS_CHANGE[heads.actions])
        heads.check(heads.is_inside[changes], changes, "a change outside a transaction")
        before = dict(self._relation_indexes)
        announcements, extras = self._read_rare(heads, transactions)
        relation_indexes = find_relations(
            heads, changes, before, self._relation_indexes, announcements
        )
        column_counts = np.array([len(a.relation.columns) for a in self._announced], np.int64)
        rows = read_rows(heads, changes, relation_indexes, column_counts, extras)
        return self._build(heads, transactions, rows)

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
        # See `messages.read_commit_time`. The sum of the highest times overflows and is negative.
        times = heads.wire.uint64[body + 8].astype(np.int64) + messages.POSTGRES_EPOCH_US
        is_time = (times >= messages.FIRST_TIME_US) & (times <= messages.LAST_TIME_US)
        times[~is_time] = messages.POSTGRES_EPOCH_US
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
        has_reached = (positions >= self._window_end) & (positions <= messages.MAX_LSN)
        ends = np.concatenate((begins[lsns >= self._window_end], keepalives[has_reached]))
        return int(ends.min()) if len(ends) else None

    def _read_rare(
        self, heads: Heads, transactions: arrow_batch.Transactions
    ) -> tuple[list[AnnouncedRelation], list[Extra]]:
        announcements: list[AnnouncedRelation] = []
        extras: list[Extra] = []

        def read_one(index: int, action: int, data: bytes) -> None:
            transaction = int(heads.begun[index])
            if action == RELATION:
                commit_lsn = Lsn(int(transactions.commit_lsns[transaction]))
                relation = messages.parse_relation(data)
                xid = int(transactions.xids[transaction])
                is_for_row = not is_for_truncate(heads.actions, index)
                resolved = self._resolve(relation, commit_lsn, xid, is_for_row)
                announced = arrow_batch.Announced(*resolved, self.number_announcement())
                relation_id = announced.relation.relation_id
                self._relation_indexes[relation_id] = len(self._announced)
                announcements.append(AnnouncedRelation(index, relation_id, len(self._announced)))
                self._announced.append(announced)
            elif action == TYPE:
                # Check the layout only: `resolve` reads types from the catalog, in more detail.
                messages.parse_type(data)
            elif action == ORIGIN:
                if not heads.is_inside[index]:
                    heads.refuse(index, "an origin outside a transaction")
                transactions.origins[transaction] = messages.parse_origin(data)
            elif action == TRUNCATE:
                extras.extend(read_truncate(heads, index, data, self._relation_indexes))
            else:
                extras.extend(
                    read_logical_message(heads, index, data, self._selection, self.warnings)
                )

        read_rare(heads, read_one)
        return announcements, extras

    def _build(
        self, heads: Heads, transactions: arrow_batch.Transactions, rows: BatchRows | None
    ) -> pa.RecordBatch | None:
        row_messages = np.empty(0, np.int64) if rows is None else rows.messages
        transaction = heads.begun[row_messages]
        if rows is not None:
            self._complete(transactions, transaction, rows.relations)
        ordinals = self._ordinals(transaction)
        self._carry(heads, transactions, transaction)
        if rows is None:
            return None
        found = rows.found
        if found.old_unchanged:
            self.warnings[OLD_UNCHANGED] += found.old_unchanged
        self.warnings.update(count_values(rows, [a.relation for a in self._announced]))
        decoded = arrow_batch.build(
            arrow_batch.Rows(
                transaction,
                ordinals,
                rows.operations,
                rows.relations,
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
        if len(rows.parked):
            add_parked(self.parked, decoded)
        return decoded if decoded.num_rows else None

    def _complete(
        self,
        transactions: arrow_batch.Transactions,
        transaction: Positions,
        relations: Positions,
    ) -> None:
        """Complete the relations of rows that prepared transactions have announced."""
        for index, each in enumerate(self._announced):
            if each.version == 0 and (uses := np.flatnonzero(relations == index)).size:
                user = int(transaction[uses[0]])
                lsn, xid = Lsn(int(transactions.commit_lsns[user])), int(transactions.xids[user])
                completed = self._resolve(each.relation, lsn, xid, False)
                self._announced[index] = arrow_batch.Announced(*completed, each.number)

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
