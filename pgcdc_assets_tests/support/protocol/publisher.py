"""A simulated pgoutput: the same transactions, as whole transactions and as streamed blocks.

The simulation keeps pgoutput's cache of announced relations (pgoutput.c, maybe_send_schema,
cleanup_rel_sync_cache, rel_sync_cache_relation_cb).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets_tests.support.protocol import encoding


@dataclass
class Change:
    """A change of a transaction: `write` encodes it for the relation at the time of the change."""

    subxid: int
    relation: Relation | None
    message: bytes


@dataclass
class Transaction:
    """A running transaction. `pending` changes were not streamed."""

    xid: int
    origin: str | None
    changes: list[Change] = field(default_factory=list)
    pending: list[Change] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    streamed: set[int] = field(default_factory=set)
    is_streamed: bool = False


@dataclass
class CachedRelation:
    """pgoutput's RelationSyncEntry."""

    is_sent: bool = False
    streamed_transactions: set[int] = field(default_factory=set)


class Publisher:
    """The two streams of a history.

    Attributes:
        whole: messages of protocol version 1.
        streamed: messages of protocol versions 2 to 4.
    """

    def __init__(self, relations: list[Relation], *, is_parallel: bool) -> None:
        self.whole: list[bytes] = []
        self.streamed: list[bytes] = []
        self.relations = {relation.relation_id: relation for relation in relations}
        self._is_parallel = is_parallel
        self._announced: dict[int, Relation] = {}
        self._cache = {relation.relation_id: CachedRelation() for relation in relations}
        self._lsn = 1000

    def alter(self, relation_id: int, column_count: int) -> None:
        """Alter a relation, which invalidates its cache entry."""
        self.relations[relation_id] = replace(
            self.relations[relation_id], columns=columns(column_count)
        )
        self._cache[relation_id] = CachedRelation()

    def stream_block(self, transaction: Transaction) -> None:
        """Stream the pending changes."""
        self.streamed.append(
            encoding.stream_start(transaction.xid, is_first=not transaction.is_streamed)
        )
        if transaction.origin and not transaction.is_streamed:
            self.streamed.append(encoding.origin(transaction.origin))
        transaction.is_streamed = True
        for change in transaction.pending:
            if change.relation is not None:
                cached = self._cache[change.relation.relation_id]
                if transaction.xid not in cached.streamed_transactions:
                    cached.streamed_transactions.add(transaction.xid)
                    message = encoding.relation(change.relation)
                    self.streamed.append(encoding.with_xid(message, change.subxid))
            self.streamed.append(encoding.with_xid(change.message, change.subxid))
            transaction.streamed.add(change.subxid)
        transaction.pending = []
        self.streamed.append(encoding.stream_stop())

    def abort(self, transaction: Transaction, subxid: int) -> None:
        """Abort the transaction, or one of its subtransactions."""
        transaction.aborted.add(subxid)
        transaction.pending = [c for c in transaction.pending if c.subxid != subxid]
        is_streamed = subxid in transaction.streamed
        if transaction.is_streamed and (is_streamed or subxid == transaction.xid):
            place = (self._lsn, 5) if self._is_parallel else None
            self.streamed.append(encoding.stream_abort(transaction.xid, subxid, place))
            for cached in self._cache.values():
                cached.streamed_transactions.discard(transaction.xid)

    def commit(self, transaction: Transaction) -> None:
        """Commit the transaction in both streams."""
        self._lsn += 10
        time = 1_700_000_000_000_000 + self._lsn
        kept = [c for c in transaction.changes if c.subxid not in transaction.aborted]
        begin = encoding.begin(self._lsn, transaction.xid, time)
        origin = [encoding.origin(transaction.origin)] if transaction.origin else []
        if kept:
            self.whole += [begin, *origin]
            for change in kept:
                relation = change.relation
                if relation and self._announced.get(relation.relation_id) != relation:
                    self._announced[relation.relation_id] = relation
                    self.whole.append(encoding.relation(relation))
                self.whole.append(change.message)
            self.whole.append(encoding.commit(self._lsn))
        if transaction.is_streamed:
            self.stream_block(transaction)
            self.streamed.append(encoding.stream_commit(transaction.xid, self._lsn, time))
            for cached in self._cache.values():
                if transaction.xid in cached.streamed_transactions:
                    cached.is_sent = True
                    cached.streamed_transactions.discard(transaction.xid)
        elif kept:
            self.streamed += [begin, *origin]
            for change in kept:
                relation = change.relation
                if relation is not None:
                    cached = self._cache[relation.relation_id]
                    if not cached.is_sent:
                        cached.is_sent = True
                        self.streamed.append(encoding.relation(relation))
                self.streamed.append(change.message)
            self.streamed.append(encoding.commit(self._lsn))

    def keepalive(self) -> None:
        """Send a keepalive in both streams."""
        for messages in (self.whole, self.streamed):
            messages.append(encoding.keepalive(self._lsn + 1))


def columns(count: int) -> tuple[Column, ...]:
    return tuple(Column(f"c{i}", 25, -1, is_key=i == 0) for i in range(count))


@st.composite
def histories(draw: st.DrawFn) -> Publisher:
    """Draw a history: transactions that run side by side, and what is streamed of each."""
    relations = [
        Relation(16384 + i, "shop", f"t{i}", ReplicaIdentity.DEFAULT, columns(draw(st.just(2))))
        for i in range(2)
    ]
    publisher = Publisher(relations, is_parallel=draw(st.booleans()))
    running: dict[int, Transaction] = {}
    next_xid = 700
    for _ in range(draw(st.integers(1, 40))):
        step = draw(st.sampled_from("begin change change change block abort commit alter".split()))
        if step == "begin" or not running:
            next_xid += 10
            origin = draw(st.sampled_from([None, None, None, "standby"]))
            running[next_xid] = Transaction(next_xid, origin)
            continue
        transaction = running[draw(st.sampled_from(sorted(running)))]
        if step == "change":
            _change(draw, publisher, transaction)
        elif step == "block":
            # The historic snapshot of a running transaction has the old relation: see `alter`.
            publisher.stream_block(transaction)
            publisher.keepalive()
        elif step == "abort":
            subxid = transaction.xid + draw(st.integers(0, 3))
            if subxid in transaction.aborted:
                continue
            publisher.abort(transaction, subxid)
            if subxid == transaction.xid:
                del running[subxid]
        elif step == "commit":
            publisher.commit(transaction)
            del running[transaction.xid]
        elif not any(other.pending for other in running.values()):
            # An ALTER TABLE waits for the transactions that changed the table. A relation altered
            # by one transaction is used by the changes after it only.
            publisher.alter(draw(st.sampled_from(relations)).relation_id, draw(st.integers(1, 4)))
    return publisher


def _change(draw: st.DrawFn, publisher: Publisher, transaction: Transaction) -> None:
    live = range(transaction.xid, transaction.xid + 4)
    subxid = draw(st.sampled_from([xid for xid in live if xid not in transaction.aborted]))
    relation = publisher.relations[draw(st.sampled_from(sorted(publisher.relations)))]
    width = len(relation.columns)
    value = f"{transaction.xid}/{subxid}/{len(transaction.changes)}".encode()
    new = [value, *[b"\xff" if draw(st.booleans()) else None] * (width - 1)]
    writers: list[tuple[Relation | None, Callable[[], bytes]]] = [
        (relation, lambda: encoding.insert(relation.relation_id, new)),
        (relation, lambda: encoding.update(relation.relation_id, new, new, b"O")),
        (relation, lambda: encoding.delete(relation.relation_id, new)),
        (relation, lambda: encoding.truncate([relation.relation_id])),
        (relation, lambda: encoding.insert(relation.relation_id, new)[:-1]),
        (None, lambda: encoding.logical_message("outbox", value)),
    ]
    used, write = draw(st.sampled_from(writers))
    change = Change(subxid, used, write())
    transaction.changes.append(change)
    transaction.pending.append(change)
