"""Decoders of streams with open transactions, with a spool and an archive in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.arrow_batch import DECODED
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.open_transaction import SPOOLED
from pgcdc_assets.protocol.prepared_transactions import PreparedKey, PreparedTransaction
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.streaming_decoder import StreamingDecoder
from pgcdc_assets_tests.support.protocol import encoding


class MemorySpool:
    """A spool in memory."""

    def __init__(self) -> None:
        self.rows: dict[int, list[pa.RecordBatch]] = {}

    def append(self, xid: int, rows: pa.RecordBatch) -> None:
        rows.validate(full=True)
        assert rows.schema == SPOOLED
        self.rows.setdefault(xid, []).append(rows)

    def read(self, xid: int) -> Iterator[pa.RecordBatch]:
        yield from self.rows.get(xid, [])

    def drop(self, xid: int) -> None:
        self.rows.pop(xid, None)

    def clear(self) -> None:
        self.rows.clear()


def by_width(
    relation: Relation, commit_lsn: Lsn, xid: int, is_for_row: bool
) -> tuple[Relation, int]:
    """Resolve a relation to a version that does not depend on the order of announcements."""
    return relation, len(relation.columns)


class MemoryArchive:
    """An archive in memory. `is_complete` tells that an unknown transaction has no rows."""

    def __init__(self, stored: Sequence[PreparedTransaction] = (), is_complete: bool = True):
        self.stored = {(each.key.xid, each.key.gid): each for each in stored}
        self.is_complete = is_complete

    def find(self, xid: int, gid: str) -> PreparedTransaction | None:
        return self.stored.get((xid, gid))

    def check_unknown(self, xid: int, gid: str, commit_lsn: Lsn) -> None:
        if not self.is_complete:
            raise LookupError(xid, gid, commit_lsn)


class Stream:
    """A decoder, with the relations that it has completed: columns, commit LSN and xid."""

    def __init__(self, end: int = 2**62, start: int = 0, **options: Any) -> None:
        self.spool = MemorySpool()
        self.completed: list[tuple[int, int, int]] = []
        self.decoder = StreamingDecoder(self._resolve, self.spool, end, start, **options)

    def _resolve(
        self, relation: Relation, commit_lsn: Lsn, xid: int, is_for_row: bool
    ) -> tuple[Relation, int]:
        self.completed.append((len(relation.columns), commit_lsn, xid))
        return by_width(relation, commit_lsn, xid, is_for_row)

    def read(self, *messages: bytes) -> list[dict[str, Any]]:
        return self.rows(MessageBatch.of(encoding.stream(messages)))

    def rows(self, batch: MessageBatch | None) -> list[dict[str, Any]]:
        assert batch is not None
        found: list[dict[str, Any]] = []
        for rows in self.decoder.decode(batch):
            rows.validate(full=True)
            assert rows.schema == DECODED
            found += rows.to_pylist()
        return found

    @property
    def unfinished(self) -> list[PreparedKey]:
        return [each.key for each in self.decoder.unfinished()]

    @property
    def ended(self) -> list[PreparedKey]:
        return self.decoder.prepared.ended


def prepared(lsn: int, xid: int, gid: str, *messages: bytes) -> list[bytes]:
    return [encoding.begin_prepare(lsn, xid, gid), *messages, encoding.prepare(lsn, xid, gid)]


def whole(lsn: int, xid: int, *messages: bytes) -> list[bytes]:
    return [encoding.begin(lsn, xid), *messages, encoding.commit(lsn)]


def places(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["commit_lsn"], row["xid"], row["ordinal"]) for row in rows]


def block(xid: int, *messages: bytes, is_first: bool = True, subxid: int = 0) -> list[bytes]:
    inside = [encoding.with_xid(message, subxid or xid) for message in messages]
    return [encoding.stream_start(xid, is_first=is_first), *inside, encoding.stream_stop()]
