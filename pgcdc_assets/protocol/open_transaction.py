"""A streamed transaction before its end: the rows of its blocks, and what its commit needs.

The rows of a block are decoded when the block arrives, and appended to a spool. Commit LSN, commit
time and ordinals are unknown until the commit, and a subtransaction may still be aborted. The
columns of a spooled row are therefore: the id of its subtransaction, the index of its relation
among the transaction's announcements, and the tuples.

pgoutput announces a relation once per streamed transaction, and again after an abort of one of its
subtransactions (pgoutput.c, maybe_send_schema and cleanup_rel_sync_cache). An announcement is valid
for the rows of its transaction only, until the transaction commits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import arrow_batch, messages
from pgcdc_assets.protocol.arrow_batch import NO_RELATION
from pgcdc_assets.protocol.batch_rows import (
    IS_CHANGE,
    IS_RARE,
    OLD_UNCHANGED,
    AnnouncedRelation,
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
    ORIGIN,
    RELATION,
    TRUNCATE,
    TYPE,
    XID_BYTES,
    Heads,
    find_context,
    is_for_truncate,
    read_block_heads,
)
from pgcdc_assets.protocol.logical_messages import EVERY_MESSAGE, MessageSelection
from pgcdc_assets.protocol.parked_rows import PARKED
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.tuples import TEXTS_TYPE, UNCHANGED_TYPE

SPOOLED = pa.schema(
    [
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("op", pa.uint8(), nullable=False),
        pa.field("announcement", pa.int64(), nullable=False),
        pa.field("old_kind", pa.uint8(), nullable=False),
        pa.field("old", TEXTS_TYPE),
        pa.field("new", TEXTS_TYPE),
        pa.field("unchanged", UNCHANGED_TYPE),
    ]
)


class UncertainMessages(Exception):
    """Logical messages of a streamed transaction may be of an aborted subtransaction.

    pgoutput sends each message of a block with the id of the top-level transaction
    (reorderbuffer.c, ReorderBufferProcessTXN). Without streaming, the server sends only messages of
    committed subtransactions.
    """


class Spool(Protocol):
    """The rows of open transactions, by the id of the top-level transaction."""

    def append(self, xid: int, rows: pa.RecordBatch) -> None:
        """Append rows of the schema `SPOOLED` to a transaction.

        Raises:
            TransientError: the rows cannot be kept.
        """

    def read(self, xid: int) -> Iterator[pa.RecordBatch]:
        """Yield a transaction's batches in the order of their appends.

        Raises:
            TransientError: the rows cannot be read.
        """

    def drop(self, xid: int) -> None:
        """Remove a transaction's rows. A transaction without rows is ignored."""

    def clear(self) -> None:
        """Remove all rows."""


class StreamedRelation(NamedTuple):
    """A relation announced inside a streamed or prepared transaction.

    Attributes:
        relation: the relation of the message; if `version` is not 0, completed from the catalog.
        xid: id of the announcing transaction or subtransaction; 0: announced before the
            transaction.
        number: position of the announcement among the announcements of the stream.
        version: version number of a completed relation; 0: not completed yet.
        is_for_row: the announcement is right before a row, not before a Truncate.
    """

    relation: Relation
    xid: int
    number: int
    version: int = 0
    is_for_row: bool = True


class Commit(NamedTuple):
    """The commit of a streamed transaction. `time_us` is in microseconds since 1970."""

    lsn: int
    time_us: int


@dataclass
class OpenTransaction:
    """A streamed or prepared transaction.

    Attributes:
        xid: id of the top-level transaction.
        has_xids: its messages have transaction ids, as in blocks of a streamed transaction.
        origin: name of the replication origin; None for a transaction of this server.
        announced: the announced relations.
        valid: index in `announced` by relation id, of the announcements that are valid now.
        aborted: ids of the aborted subtransactions.
        has_messages: a block has had a logical message of the transaction.
        is_uncertain: a subtransaction was aborted after such a message.
        with_parked: ids of the transaction and subtransactions that have parked rows.
        warnings: counts by description, by the id of the transaction or subtransaction.
    """

    xid: int
    has_xids: bool = True
    origin: str | None = None
    announced: list[StreamedRelation] = field(default_factory=list)
    valid: dict[int, int] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    has_messages: bool = False
    is_uncertain: bool = False
    with_parked: set[int] = field(default_factory=set)
    warnings: dict[int, Counter[str]] = field(default_factory=dict)

    def abort(self, subxid: int) -> None:
        """Record the abort of a subtransaction. Its rows stay in the spool until the commit."""
        self.aborted.add(subxid)
        self.is_uncertain = self.is_uncertain or self.has_messages
        self.valid.clear()

    def read_block(
        self,
        batch: MessageBatch,
        number_announcement: Callable[[], int],
        selection: MessageSelection = EVERY_MESSAGE,
    ) -> pa.RecordBatch | None:
        """Return the rows of a block's messages, in the schema `SPOOLED`; None without a row.

        Args:
            batch: messages between a Stream Start and its Stream Stop, or between Begin Prepare
                and Prepare.
            number_announcement: function that returns the number of the next announcement.
            selection: the logical messages to land.

        Raises:
            ProtocolError: a message is malformed; the error names the table, if it is known.
        """
        try:
            return self._read_block(batch, number_announcement, selection)
        except ProtocolError as error:
            raise self._with_relation(error, batch) from None

    def _read_block(
        self,
        batch: MessageBatch,
        number_announcement: Callable[[], int],
        selection: MessageSelection,
    ) -> pa.RecordBatch | None:
        heads, xids = read_block_heads(batch, None if self.has_xids else self.xid)
        is_known = IS_CHANGE[heads.actions] | IS_RARE[heads.actions] | (heads.actions == 0)
        heads.check(is_known, slice(None), "the message is not allowed in a block")
        has_xid = (heads.actions != 0) & (heads.actions != ORIGIN)
        heads.check(~has_xid | (xids > 0), slice(None), "the transaction id is 0")
        changes = np.flatnonzero(IS_CHANGE[heads.actions])
        before = dict(self.valid)
        announcements, extras = self._read_rare(heads, xids, number_announcement, selection)
        relation_indexes = find_relations(heads, changes, before, self.valid, announcements)
        relations = [each.relation for each in self.announced]
        column_counts = np.array([len(relation.columns) for relation in relations], np.int64)
        rows = read_rows(heads, changes, relation_indexes, column_counts, extras)
        if rows is None:
            return None
        row_xids, found = xids[rows.messages], rows.found
        self.with_parked.update(row_xids[rows.parked].tolist())
        for xid in np.unique(row_xids[np.concatenate((found.rescued, rows.parked))]).tolist():
            self._warnings_of(xid).update(count_values(rows, relations, row_xids == xid))
        if found.old_unchanged:
            self._warnings_of(self.xid)[OLD_UNCHANGED] += found.old_unchanged
        return pa.RecordBatch.from_arrays(
            [
                pa.array(row_xids),
                pa.array(rows.operations),
                pa.array(rows.relations),
                pa.array(found.old_kinds),
                found.old,
                found.new,
                found.unchanged,
            ],
            schema=SPOOLED,
        )

    def _with_relation(self, error: ProtocolError, batch: MessageBatch) -> ProtocolError:
        """Return the error with the table of the malformed message. The commit LSN is unknown."""
        if error.start is None:
            return error
        relation_id, _ = find_context(batch, error.start, XID_BYTES if self.has_xids else 0)
        index = self.valid.get(relation_id or 0)
        if index is None:
            return error.of(relation_id, None)
        return error.of(self.announced[index].relation.qualified_name, None)

    def _read_rare(
        self,
        heads: Heads,
        xids: Positions,
        number_announcement: Callable[[], int],
        selection: MessageSelection,
    ) -> tuple[list[AnnouncedRelation], list[Extra]]:
        announcements: list[AnnouncedRelation] = []
        extras: list[Extra] = []

        def read_one(index: int, action: int, data: bytes) -> None:
            if action == RELATION:
                relation = messages.parse_relation(data)
                self.valid[relation.relation_id] = len(self.announced)
                announcements.append(
                    AnnouncedRelation(index, relation.relation_id, len(self.announced))
                )
                is_for_row = not is_for_truncate(heads.actions, index)
                self.announced.append(
                    StreamedRelation(
                        relation, int(xids[index]), number_announcement(), 0, is_for_row
                    )
                )
            elif action == TYPE:
                # Check the layout only: the catalog has the types in more detail.
                messages.parse_type(data)
            elif action == ORIGIN:
                self.origin = messages.parse_origin(data)
            elif action == TRUNCATE:
                extras.extend(read_truncate(heads, index, data, self.valid))
            else:
                warnings = self._warnings_of(int(xids[index]))
                found = read_logical_message(heads, index, data, selection, warnings)
                self.has_messages = self.has_messages or bool(found)
                extras.extend(found)

        read_rare(heads, read_one)
        return announcements, extras

    def _warnings_of(self, xid: int) -> Counter[str]:
        return self.warnings.setdefault(xid, Counter())

    @property
    def has_parked(self) -> bool:
        """Whether one of the rows so far is parked, without those of aborted subtransactions."""
        return not self.with_parked <= self.aborted

    def own_announcements(self) -> list[int]:
        """Return the indexes of the announcements of the transaction, without aborted ones."""
        return [
            index
            for index, each in enumerate(self.announced)
            if each.xid and each.xid not in self.aborted
        ]

    def without_aborted(self, spooled: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch of the spool without those of aborted subtransactions."""
        if not self.aborted:
            return spooled
        is_kept = ~np.isin(spooled.column("xid").to_numpy(), list(self.aborted))
        return spooled if is_kept.all() else spooled.filter(pa.array(is_kept))

    def committed_warnings(self) -> Counter[str]:
        """Return the counts of warnings without those of aborted subtransactions."""
        total: Counter[str] = Counter()
        for xid, counts in self.warnings.items():
            if xid not in self.aborted:
                total += counts
        return total


class CommittedRows:
    """The rows of a streamed or prepared transaction after its commit.

    Args:
        transaction: the transaction.
        commit: its commit.
        resolve: function that completes an announced relation, see `decoder.Decoder`.
    """

    def __init__(
        self,
        transaction: OpenTransaction,
        commit: Commit,
        resolve: Callable[[Relation, bool], tuple[Relation, int]],
    ) -> None:
        self._transaction = transaction
        self._resolve = resolve
        self._is_resolved = [each.version > 0 for each in transaction.announced]
        self._announced = [
            arrow_batch.Announced(each.relation, each.version, each.number)
            for each in transaction.announced
        ]
        self._context = arrow_batch.Transactions(
            np.array([commit.lsn], np.int64),
            np.array([commit.time_us], np.int64),
            np.array([transaction.xid], np.int64),
            [transaction.origin],
        )
        self._next_ordinal = 0
        for index in transaction.own_announcements():
            self._resolve_one(index)

    def valid_relations(self) -> list[arrow_batch.Announced]:
        """Return the resolved relations whose announcements are valid after the last message."""
        return [
            self._announced[index]
            for index in self._transaction.valid.values()
            if self._is_resolved[index]
        ]

    def build(self, spooled: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the next rows in the schema `arrow_batch.DECODED`, without aborted rows."""
        spooled = self._transaction.without_aborted(spooled)
        count = spooled.num_rows
        if count == 0:
            return None
        relations = spooled.column("announcement").to_numpy()
        for index in np.unique(relations).tolist():
            if index != NO_RELATION and not self._is_resolved[index]:
                self._resolve_one(index)
        ordinals = np.arange(self._next_ordinal, self._next_ordinal + count)
        self._next_ordinal += count
        return arrow_batch.build(
            arrow_batch.Rows(
                np.zeros(count, np.int64),
                ordinals,
                spooled.column("op").to_numpy(),
                relations,
                spooled.column("old_kind").to_numpy(),
                spooled.column("old"),
                spooled.column("new"),
                spooled.column("unchanged"),
            ),
            self._context,
            self._announced,
        )

    @staticmethod
    def has_parked(spooled: pa.RecordBatch) -> bool:
        """Return whether one of the rows is parked."""
        return bool((spooled.column("op").to_numpy() == PARKED).any())

    def _resolve_one(self, index: int) -> None:
        each, announced = self._announced[index], self._transaction.announced[index]
        is_for_row = announced.xid > 0 and announced.is_for_row
        resolved = self._resolve(each.relation, is_for_row)
        self._announced[index] = arrow_batch.Announced(*resolved, each.number)
        self._is_resolved[index] = True
