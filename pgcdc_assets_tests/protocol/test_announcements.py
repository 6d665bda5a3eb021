"""Which announcements of a stream are right before a row of their transaction."""

from __future__ import annotations

from dataclasses import replace

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.streaming_decoder import StreamingDecoder
from pgcdc_assets_tests.protocol.test_decoder import ORDERS
from pgcdc_assets_tests.protocol.test_streamed_transactions import ANNOUNCED, ROW
from pgcdc_assets_tests.support.protocol import encoding
from pgcdc_assets_tests.support.protocol.streaming import (
    MemorySpool,
    block,
    by_width,
    prepared,
    whole,
)


def test_only_an_announcement_right_before_a_row_of_its_transaction_counts() -> None:
    """Decision 71: the order of these announcements shows the partitions of a root."""
    found: list[tuple[int, int, bool]] = []

    def resolve(
        relation: Relation, commit_lsn: Lsn, xid: int, is_for_row: bool
    ) -> tuple[Relation, int]:
        found.append((xid, relation.relation_id, is_for_row))
        return by_width(relation, commit_lsn, xid, is_for_row)

    other = encoding.relation(replace(ORDERS, relation_id=16401))
    other_row = encoding.insert(16401, [b"1", b"a", None])
    inside = [ANNOUNCED, other, encoding.truncate([16400, 16401]), ANNOUNCED, ROW]
    messages = [
        *whole(900, 700, *inside),
        *block(701, *inside),
        encoding.stream_commit(701, 1000),
        *prepared(1100, 702, "g", other, other_row),
        *whole(1200, 703, other_row),
        encoding.commit_prepared(1300, 702, "g"),
    ]
    decoder = StreamingDecoder(resolve, MemorySpool(), 2**62)
    list(decoder.decode(MessageBatch.of(encoding.stream(messages))))
    truncated = [(16400, False), (16401, False), (16400, True)]
    assert found == [
        *[(xid, *each) for xid in (700, 701) for each in truncated],
        # The prepared transaction has announced the relation.
        (703, 16401, False),
        (702, 16401, True),
    ]
