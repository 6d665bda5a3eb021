"""Decoding of protocol versions 1 to 4, with streaming of open transactions.

With `streaming 'on'` the server sends a large transaction before its commit, in blocks between
Stream Start and Stream Stop (53.5 Logical Streaming Replication Protocol). Blocks of several
transactions alternate with each other and with whole transactions, but do not overlap. Stream
Commit ends a streamed transaction. Stream Abort drops the transaction, or one of its
subtransactions.

The rows of a block go to a spool (see `open_transaction`). Stream Commit brings the commit LSN: the
rows then leave the spool, with the same columns, ordinals and relation versions as without
streaming. Whole transactions are decoded by `Decoder`. Stream Commit and Commit arrive in the order
of the commit LSNs, so the order of the rows stays (commit_lsn, ordinal).

An open transaction at the window's end belongs to a later window. If the stream ends, the spool is
worthless: the server sends an open transaction again from its start, because `restart_lsn` is not
above the start of the oldest open transaction. A prepared transaction is not sent again: see
`prepared_transactions`.

Batches are cut at the delimiters of the versions 2 to 4. Blocks of one transaction that follow each
other in a batch are decoded together, because a block may be small: it has up to
`logical_decoding_work_mem` of changes. Non-transactional logical messages are read apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.decoder import Decoder, Resolve
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.heads import (
    ACTION_AT,
    MOST_VALUES,
    XID_BYTES,
    read_actions,
    split_by_values,
)
from pgcdc_assets.protocol.logical_messages import NonTransactionalMessages
from pgcdc_assets.protocol.open_transaction import (
    Commit,
    CommittedRows,
    OpenTransaction,
    Spool,
    UncertainMessages,
)
from pgcdc_assets.protocol.parked_rows import ParkedRows, add_parked
from pgcdc_assets.protocol.prepared_transactions import (
    NothingPrepared,
    PreparedArchive,
    PreparedTransaction,
    PreparedTransactions,
    begin_prepared,
    own_announcements,
)
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.transaction_messages import (
    BEGIN_PREPARE,
    PREPARE,
    ROLLBACK_PREPARED,
    STREAM_ABORT,
    STREAM_COMMIT,
    STREAM_PREPARE,
    STREAM_START,
    STREAM_STOP,
    TWO_PHASE,
    Prepared,
    check_stream_stop,
    parse_begin_prepare,
    parse_prepared,
    parse_rollback_prepared,
    parse_stream_abort,
    parse_stream_commit,
    parse_stream_start,
)

_IS_DELIMITER = np.zeros(256, np.bool_)
_IS_DELIMITER[[STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT, *TWO_PHASE]] = True


class StreamingDecoder:
    """Decoder of a stream of any protocol version, one window after the other.

    Args:
        resolve: see `Decoder`. The relations of a streamed transaction are completed at its commit.
        spool: keeps the rows of open transactions. The decoder clears the spool.
        window_end: see `Decoder`.
        window_start: see `Decoder`.
        most_values: bound of the column values that are decoded at once.
        archive: the stored prepared transactions.
        messages: chooses the logical messages to land; default: all transactional ones.

    Attributes:
        messages: the same.
        prepared: the prepared transactions.
    """

    def __init__(
        self,
        resolve: Resolve,
        spool: Spool,
        window_end: int,
        window_start: int = 0,
        most_values: int = MOST_VALUES,
        archive: PreparedArchive | None = None,
        messages: NonTransactionalMessages | None = None,
    ) -> None:
        self._resolve = resolve
        self._spool = spool
        self._most_values = most_values
        self.messages = messages or NonTransactionalMessages()
        self._whole = Decoder(resolve, window_end, window_start, self.messages.selection)
        self._transactions: dict[int, OpenTransaction] = {}
        self._block: OpenTransaction | None = None
        # The message Begin Prepare of the transaction in `_block`.
        self._preparing: Prepared | None = None
        self.prepared = PreparedTransactions(spool, archive or NothingPrepared())
        # The messages of the last blocks of a transaction that are not decoded yet.
        self._waiting: tuple[OpenTransaction, list[slice]] | None = None
        self._begin(window_end, window_start)
        spool.clear()

    def begin_window(self, window_end: int, window_start: int) -> None:
        """Continue with the next window of the same stream. Open transactions stay open."""
        self._whole.begin_window(window_end, window_start)
        self._begin(window_end, window_start)

    def _begin(self, window_end: int, window_start: int) -> None:
        self._window_start, self._window_end = int(window_start), int(window_end)
        self.messages.begin_window(self._window_end, self._window_start)
        self._rest: MessageBatch | None = None
        self.prepared.begin_window()

    @property
    def is_finished(self) -> bool:
        """Whether the decoder has seen the end of the window. It ignores later messages."""
        return self._rest is not None

    @property
    def rest(self) -> MessageBatch | None:
        """The messages from the window's end on in the last batch; None before the end."""
        return self._rest

    @property
    def warnings(self) -> Counter[str]:
        """Counts of messages and values of committed transactions that are not landed as sent."""
        return self._whole.warnings

    @property
    def parked(self) -> dict[int, ParkedRows]:
        """The parked rows of committed transactions so far, by relation id."""
        return self._whole.parked

    @property
    def open_transaction_count(self) -> int:
        """Number of streamed transactions without a commit or abort so far."""
        return len(self._transactions)

    def unfinished(self) -> list[PreparedTransaction]:
        """Return the transactions that were prepared in the window and did not end in the window.

        The server does not send these transactions again to a stream from the window's end.
        """
        return self.prepared.prepared_between(self._window_start, self._window_end)

    def decode(self, batch: MessageBatch) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the transactions that commit in the next messages.

        The batches have the schema `arrow_batch.DECODED`. The decoder bounds the values that are
        decoded at once, so the caller does not split batches. Exhaust the iterator.

        Raises:
            ProtocolError: a message is malformed. Discard the decoder after this error.
            RawZoneError: the rows of a prepared transaction are missing.
            TransientError: the spool failed.
        """
        if self.is_finished:
            return
        yield from self._decode(batch)
        yield from self.messages.take()

    def _decode(self, batch: MessageBatch) -> Iterator[pa.RecordBatch]:
        first, actions = 0, read_actions(batch)
        self.messages.find(batch, actions)
        delimiters = np.flatnonzero(_IS_DELIMITER[actions])
        for index in [*delimiters.tolist(), len(batch.starts)]:
            yield from self._run(batch, first, index)
            if self.is_finished:
                return
            if index == len(batch.starts):
                self._read_blocks(batch)
                return
            start = int(batch.starts[index])
            data = batch.buffer[start + ACTION_AT : batch.ends[index]].tobytes()
            try:
                yield from self._delimiter(batch, index, data)
            except ProtocolError as error:
                raise error if error.start is not None else error.at(start) from None
            if self.is_finished:
                return
            first = index + 1

    def _run(self, batch: MessageBatch, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Decode the messages between two delimiters."""
        if first == last:
            return
        if self._block is not None:
            if self._waiting is None:
                self._waiting = (self._block, [])
            self._waiting[1].append(slice(first, last))
            return
        self._read_blocks(batch)
        chosen, end = self.messages.leave_out(batch, first, last)
        run = MessageBatch(batch.buffer, batch.starts[chosen], batch.ends[chosen])
        for part in split_by_values(run, self._most_values):
            rows = self._whole.decode(part)
            if rows is not None:
                yield rows
            if self._whole.rest is not None:
                end = int(np.searchsorted(batch.starts, self._whole.rest.starts[0]))
                break
        self.messages.add(batch, first, end)
        if end < last:
            self._finish(batch, end)

    def _finish(self, batch: MessageBatch, index: int) -> None:
        """End the window before the message at `index`."""
        self._rest = MessageBatch(batch.buffer, batch.starts[index:], batch.ends[index:])

    def _read_blocks(self, batch: MessageBatch) -> None:
        """Decode the blocks that wait. They are of one transaction, without an abort between."""
        if self._waiting is None:
            return
        (transaction, slices), self._waiting = self._waiting, None
        starts, ends = (
            np.concatenate([positions[each] for each in slices])
            for positions in (batch.starts, batch.ends)
        )
        run = MessageBatch(batch.buffer, starts, ends)
        number = self._whole.number_announcement
        xid_bytes = XID_BYTES if transaction.has_xids else 0
        for part in split_by_values(run, self._most_values, xid_bytes):
            rows = transaction.read_block(part, number, self.messages.selection)
            if rows is not None:
                self._spool.append(transaction.xid, rows)

    def _delimiter(self, batch: MessageBatch, index: int, data: bytes) -> Iterator[pa.RecordBatch]:
        action = data[0]
        if self._whole.is_open:
            raise _refused(data, "a streamed transaction inside a transaction")
        if action == PREPARE and self._preparing is not None:
            self._read_blocks(batch)
            self._end_block_by_prepare(data)
        elif action == STREAM_STOP:
            check_stream_stop(data)
            if self._block is None or self._preparing is not None:
                raise _refused(data, "the end of a block outside a block")
            self._block = None
        elif self._block is not None:
            raise _refused(data, "a streamed transaction inside a block")
        elif action in TWO_PHASE:
            self._read_blocks(batch)
            yield from self._two_phase(batch, index, data)
        elif action == STREAM_START:
            self._start_block(batch, data)
        elif action == STREAM_ABORT:
            self._read_blocks(batch)
            self._abort(data)
        else:
            self._read_blocks(batch)
            yield from self._commit(batch, index, data)

    def _start_block(self, batch: MessageBatch, data: bytes) -> None:
        start = parse_stream_start(data)
        known = self._transactions.get(start.xid)
        if start.is_first is (known is not None):
            raise _refused(data, "the flag of the transaction's first block is wrong")
        self._block = self._transactions.setdefault(start.xid, OpenTransaction(start.xid))
        if self._waiting is not None and self._waiting[0] is not self._block:
            self._read_blocks(batch)

    def _abort(self, data: bytes) -> None:
        abort = parse_stream_abort(data)
        if abort.subxid == abort.xid:
            self._drop_streamed(abort.xid)
        elif abort.xid in self._transactions:
            # The server also sends the abort of a subtransaction whose rows it has left out, of a
            # transaction without a block. Postgres's subscriber ignores this message as well.
            self._transactions[abort.xid].abort(abort.subxid)

    def _commit(self, batch: MessageBatch, index: int, data: bytes) -> Iterator[pa.RecordBatch]:
        commit = parse_stream_commit(data)
        transaction = self._find(data, commit.xid)
        if commit.commit_lsn <= self._whole.last_commit_lsn:
            raise _refused(data, "the commit LSN is not above the last one")
        if commit.commit_lsn >= self._window_end:
            self._finish(batch, index)
            return
        committed = Commit(Lsn(commit.commit_lsn), commit.time_us)
        rows = self._committed(transaction, committed)
        self._whole.add_streamed(committed.lsn, rows.valid_relations())
        if committed.lsn >= self._window_start:
            yield from self._build(transaction, rows, self._spool.read(commit.xid))
        del self._transactions[commit.xid]
        self._spool.drop(commit.xid)

    def _committed(self, transaction: OpenTransaction, commit: Commit) -> CommittedRows:
        def resolve(relation: Relation, is_for_row: bool) -> tuple[Relation, int]:
            return self._resolve(relation, Lsn(commit.lsn), transaction.xid, is_for_row)

        return CommittedRows(transaction, commit, resolve)

    def _build(
        self,
        transaction: OpenTransaction,
        rows: CommittedRows,
        spooled: Iterable[pa.RecordBatch],
    ) -> Iterator[pa.RecordBatch]:
        self.warnings.update(transaction.committed_warnings())
        for batch in spooled:
            decoded = rows.build(batch)
            if decoded is not None:
                if rows.has_parked(batch):
                    add_parked(self.parked, decoded)
                yield decoded

    def _two_phase(self, batch: MessageBatch, index: int, data: bytes) -> Iterator[pa.RecordBatch]:
        action = data[0]
        if action == ROLLBACK_PREPARED:
            # The start of the record is unknown, so the message may belong to the next window. If
            # the next stream sends the message again, the transaction is unknown.
            rollback = parse_rollback_prepared(data)
            self.prepared.end(rollback.xid, rollback.gid)
            self._drop_streamed(rollback.xid)
            return
        message = (parse_begin_prepare if action == BEGIN_PREPARE else parse_prepared)(data)
        if message.lsn >= self._window_end:
            self._finish(batch, index)
        elif action == BEGIN_PREPARE:
            self._drop_streamed(message.xid)
            self._preparing = message
            self._block = begin_prepared(message.xid, self._whole.valid_announcements)
        elif action == STREAM_PREPARE:
            self.prepared.add(message, self._find(data, message.xid))
            del self._transactions[message.xid]
        elif action == PREPARE:
            # Without a Begin Prepare, the transaction has no changes.
            self._drop_streamed(message.xid)
            self.prepared.add(message, begin_prepared(message.xid, ()))
        else:
            yield from self._commit_prepared(data, message)

    def _end_block_by_prepare(self, data: bytes) -> None:
        prepared, transaction = parse_prepared(data), self._block
        if transaction is None or prepared != self._preparing:
            raise _refused(data, "the Prepare is not of the transaction of the Begin Prepare")
        self._preparing = self._block = None
        self._whole.add_prepared(own_announcements(transaction))
        self.prepared.add(prepared, transaction)

    def _commit_prepared(self, data: bytes, message: Prepared) -> Iterator[pa.RecordBatch]:
        commit = Commit(Lsn(message.lsn), message.time_us)
        if commit.lsn <= self._whole.last_commit_lsn:
            raise _refused(data, "the commit LSN is not above the last one")
        prepared = self.prepared.find(message.xid, message.gid, Lsn(commit.lsn))
        self._whole.add_streamed(commit.lsn, ())
        if prepared is not None and commit.lsn >= self._window_start:
            rows = self._committed(prepared.transaction, commit)
            self._whole.add_completed(rows.valid_relations())
            yield from self._build(prepared.transaction, rows, prepared.read())
        self.prepared.end(message.xid, message.gid)

    def _drop_streamed(self, xid: int) -> None:
        """Drop a streamed transaction that has ended without a Stream Abort.

        The server may notice during a block that the prepared transaction was rolled back.
        """
        if self._transactions.pop(xid, None) is not None:
            self._spool.drop(xid)

    def _find(self, data: bytes, xid: int) -> OpenTransaction:
        transaction = self._transactions.get(xid)
        if transaction is None:
            raise _refused(data, f"transaction {xid} was never streamed")
        if transaction.is_uncertain:
            raise UncertainMessages
        return transaction


def _refused(data: bytes, reason: str) -> ProtocolError:
    return ProtocolError(message_type=chr(data[0]), offset=ACTION_AT, reason=reason)
