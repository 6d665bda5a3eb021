"""The running stream of a session: its messages in hand, its decoder, and the known relations."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

from pgcdc_assets.capture.captured_slot import CapturedSlot
from pgcdc_assets.capture.prepared_archive import StoredTransactions
from pgcdc_assets.capture.schema_watch import SchemaWatch
from pgcdc_assets.capture.spool import TransactionSpool
from pgcdc_assets.errors import ConnectionLost
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.catalog.relation_resolver import CatalogResolver
from pgcdc_assets.postgres.encodings import TextNotConvertible, stored_encoding
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.protocol.announcement_runs import AnnouncementRuns
from pgcdc_assets.protocol.empty_batches import is_empty, is_quiet
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.logical_messages import MessageSelection, NonTransactionalMessages
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.stored_messages import StoredMessages
from pgcdc_assets.protocol.streaming_decoder import StreamingDecoder

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection


class SourceStream:
    """A started stream, whose messages are decoded window by window.

    Args:
        stream: the stream.
        captured: the slot and the raw zone.
        conn: a connection to the database, which resolves the announced relations.
        position: the LSN at which the next window starts.
        epoch: the epoch.

    Attributes:
        archive: the stored prepared transactions.
        position: end of the last window whose messages were decoded.
    """

    def __init__(
        self,
        stream: ReplicationStream,
        captured: CapturedSlot,
        conn: Connection,
        position: Lsn,
        epoch: int,
    ) -> None:
        self.stream = stream
        self.position = position
        zone = self._zone = captured.zone
        self._epoch = epoch
        self._read_look = cache(lambda: zone.definitions.newest(self._epoch))
        self._catalog = CatalogResolver(captured.settings, conn, captured.publication, self._known)
        self._schema: SchemaWatch | None = None
        encoding = stored_encoding(conn) if stream.is_as_stored else None
        self._stored = None if encoding is None else StoredMessages(encoding)
        self._runs = AnnouncementRuns()
        self._batches = chain.from_iterable(map(self._received, stream.batches()))
        self._spool = TransactionSpool()
        # Batches behind the last window, and whether they have changes.
        self._hand: deque[MessageBatch] = deque()
        self._has_changes = False
        self.archive = StoredTransactions(
            zone, epoch, position, conn.server_version, is_standby=stream.is_standby
        )
        self.decoder = StreamingDecoder(
            self._resolve,
            self._spool,
            position,
            position,
            archive=self.archive,
            messages=_read_messages(captured, epoch),
        )

    def finish(self) -> bool:
        """End the stream. See `ReplicationStream.finish`."""
        try:
            return self.stream.finish()
        except ConnectionLost:
            with contextlib.suppress(TextNotConvertible):
                self.stream.check()
                raise
            # The stream has ended at a text of a later window.
            return False

    def close(self) -> None:
        """Close the stream, and remove the rows of open transactions."""
        try:
            self.stream.close()
        finally:
            self._spool.close()

    def begin_window(self, window: LsnWindow, schema: SchemaWatch) -> None:
        """Continue with a window.

        Args:
            window: starts at `position`.
            schema: receives the relations that the window's transactions announce.
        """
        self._schema = schema
        # Another process may have looked at the catalog, or stored versions, since the last window.
        self._read_look.cache_clear()
        self._zone.relations.discard()
        self._catalog.warnings.clear()
        self.decoder.begin_window(window.end, window.start)

    def messages(self) -> Iterator[MessageBatch]:
        """Return the messages in hand, and then those that arrive, without an end.

        For errors see `ReplicationStream.batches`.
        """
        # Not one generator: its end would close `_batches`, which the next window reads.
        return chain(self._take_hand(), self._batches)

    def _received(self, batch: MessageBatch) -> list[MessageBatch]:
        converted = batch if self._stored is None else self._stored.convert(batch)
        return self._runs.complete(converted)

    def _take_hand(self) -> Iterator[MessageBatch]:
        # A window may end before the last batch.
        while self._hand:
            yield self._hand.popleft()

    def has_changes(self) -> bool:
        """Return whether changes have arrived behind the last window. The call does not wait.

        Empty transactions are dropped: they have no row, in a retry neither.

        Raises:
            PgcdcError: the stream has ended.
        """
        while not self._has_changes and (batch := self.stream.poll()) is not None:
            for received in self._received(batch):
                self._keep(received)
        return self._has_changes

    def _keep(self, batch: MessageBatch) -> None:
        """Keep a batch. Of batches without a row, which follow each other, keep the last one.

        The last keepalive may be the proof of the next window's end.
        """
        if len(batch.starts) == 0:
            return
        if self._hand and is_empty(batch) and is_empty(self._hand[-1]):
            self._hand[-1] = batch
            return
        self._hand.append(batch)
        self._has_changes |= not is_quiet(batch)

    def end_window(self, window: LsnWindow) -> None:
        """Keep the messages that follow the window's end."""
        self.archive.end_window(self.decoder, window)
        self.position = window.end
        later, self._hand, self._has_changes = self._hand, deque(), False
        rest = self.decoder.rest
        assert rest is not None, "the decoder has reached the window's end"
        for batch in (rest, *later):
            self._keep(batch)

    def warnings(self) -> Counter[str]:
        """Return the counts of the window's warnings, by description."""
        return self.decoder.warnings + self._catalog.warnings

    def _resolve(
        self, announced: Relation, commit_lsn: Lsn, xid: int, is_for_row: bool
    ) -> tuple[Relation, int]:
        assert self._schema is not None
        completed = self._catalog.complete(announced, commit_lsn, xid)
        relation = completed.relation
        version = self._schema.register(relation, commit_lsn, completed.doubt, is_for_row)
        return relation, version

    def _known(self, relation_id: int) -> list[tuple[Lsn, Relation]]:
        seen = self._read_look().tables.get(relation_id)
        looked = [] if seen is None else [(seen.lsn, seen.definition.relation)]
        registered = self._zone.relations.registered(self._epoch, relation_id)
        return sorted([*looked, *registered], key=lambda version: version[0])


def _read_messages(captured: CapturedSlot, epoch: int) -> NonTransactionalMessages:
    """Return the logical messages to land, after those that are landed."""
    policy = captured.limits.messages
    if policy is None:
        return NonTransactionalMessages()
    prefixes = None if policy.prefixes is None else frozenset(map(str.encode, policy.prefixes))
    return NonTransactionalMessages(
        MessageSelection(prefixes, non_transactional=True),
        captured.zone.changes.messages_through(epoch),
    )
