"""Which announcements of a stream are right before a row of their transaction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.capture.sent_partitions import SentPartitions
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.announcement_runs import AnnouncementRuns
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


@pytest.mark.parametrize("with_keepalives", [False, True])
def test_the_cuts_of_a_stream_decide_no_announcement(with_keepalives: bool) -> None:
    """The bytes of a connection may be cut between a Relation and its Truncate or row."""
    other, third = (encoding.relation(replace(ORDERS, relation_id=oid)) for oid in (16401, 16402))
    third_row = encoding.insert(16402, [b"1", b"a", None])
    truncated = [ANNOUNCED, other, encoding.truncate([16400, 16401]), third, third_row]
    sent = [other, third, third_row]
    whole_stream = [
        *whole(900, 700, *truncated),
        *block(701, *truncated),
        encoding.stream_commit(701, 1000),
        *whole(1200, 703, *sent),
        *block(704, *sent),
        encoding.stream_commit(704, 1300),
    ]
    messages = encoding.stream(whole_stream)
    if with_keepalives:
        messages = [each for one in messages for each in (one, encoding.keepalive(0))]

    def decode(*batches: list[bytes]) -> tuple[list[tuple[int, int, bool]], set[tuple[int, int]]]:
        found: list[tuple[int, int, bool]] = []
        partitions = SentPartitions()

        def resolve(
            relation: Relation, commit_lsn: Lsn, xid: int, is_for_row: bool
        ) -> tuple[Relation, int]:
            found.append((xid, relation.relation_id, is_for_row))
            partitions.note(relation, commit_lsn, is_for_row)
            return by_width(relation, commit_lsn, xid, is_for_row)

        decoder, runs, count = (
            StreamingDecoder(resolve, MemorySpool(), 2**62),
            AnnouncementRuns(),
            0,
        )
        for batch in batches:
            for received in runs.complete(MessageBatch.of(batch)):
                count += len(received.starts)
                list(decoder.decode(received))
        assert count == len(messages)
        return found, set(partitions.sent)

    expected = decode(messages)
    assert expected[1] == {(16401, 16402)}
    for cut in range(1, len(messages)):
        assert decode(messages[:cut], messages[cut:]) == expected, cut
    assert decode(*([message] for message in messages)) == expected
