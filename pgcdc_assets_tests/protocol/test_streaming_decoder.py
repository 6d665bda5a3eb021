"""Streamed transactions have the rows, ordinals and relations of whole transactions."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.arrow_batch import DECODED
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.heads import MOST_VALUES
from pgcdc_assets.protocol.open_transaction import UncertainMessages
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.streaming_decoder import StreamingDecoder
from pgcdc_assets_tests.protocol.test_decoder import FAR, ORDERS
from pgcdc_assets_tests.support.protocol import encoding
from pgcdc_assets_tests.support.protocol.publisher import Publisher, histories
from pgcdc_assets_tests.support.protocol.streaming import MemorySpool, block, by_width

ROW = encoding.insert(16400, [b"1", b"a", None])


def streaming(end: int = FAR, **options: Any) -> tuple[StreamingDecoder, MemorySpool]:
    spool = MemorySpool()
    return StreamingDecoder(by_width, spool, end, **options), spool


def decode(decoder: StreamingDecoder, messages: list[bytes]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        for batch in decoder.decode(MessageBatch.of(encoding.stream(messages))):
            batch.validate(full=True)
            assert batch.schema == DECODED
            rows += batch.to_pylist()
    except UncertainMessages:
        # The session reads such a transaction again without streaming.
        reject()
    return rows


@settings(max_examples=100, deadline=None)
@given(histories(), st.data())
def test_any_history_has_the_same_rows_streamed_and_whole(
    history: Publisher, data: st.DataObject
) -> None:
    whole = Decoder(by_width, FAR)
    batch = whole.decode(MessageBatch.of(encoding.stream(history.whole)))
    expected = [] if batch is None else batch.to_pylist()
    cuts = data.draw(st.lists(st.integers(0, len(history.streamed)), max_size=6))
    decoder, spool = streaming(most_values=data.draw(st.sampled_from([1, 5, MOST_VALUES])))

    rows = []
    for first, last in itertools.pairwise([0, *sorted(cuts), len(history.streamed)]):
        rows += decode(decoder, history.streamed[first:last])

    assert rows == expected
    assert Counter(decoder.warnings) == whole.warnings
    assert decoder.parked == whole.parked
    assert len(spool.rows) <= decoder.open_transaction_count


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_windows_cut_a_stream_between_its_commits_without_loss(
    history: Publisher, data: st.DataObject
) -> None:
    decoder, _ = streaming()
    expected = decode(decoder, history.streamed)
    ends = sorted(set(data.draw(st.lists(st.integers(1000, 1200), max_size=4))))
    decoder, _ = streaming(end=[*ends, FAR][0])

    rows, rest = [], MessageBatch.of(encoding.stream(history.streamed))
    for start, end in itertools.pairwise([0, *ends, FAR]):
        decoder.begin_window(end, start)
        for batch in decoder.decode(rest):
            found = batch.to_pylist()
            assert all(start <= row["commit_lsn"] < end for row in found)
            rows += found
        if not decoder.is_finished:
            break
        assert decoder.rest is not None
        rest = decoder.rest

    assert rows == expected


def test_interleaved_transactions_land_in_the_order_of_their_commits() -> None:
    decoder, spool = streaming()
    first = [encoding.relation(ORDERS), encoding.insert(16400, [b"1", b"first", None])]
    second = [encoding.relation(ORDERS), encoding.insert(16400, [b"2", b"second", None])]

    assert decode(decoder, block(701, *first) + block(702, *second)) == []
    assert decode(decoder, block(701, ROW, is_first=False)) == []
    assert decoder.open_transaction_count == 2
    rows = decode(
        decoder,
        [
            *block(702, is_first=False),
            encoding.stream_commit(702, 2000),
            encoding.begin(2010, 703),
            ROW,
            encoding.commit(2010),
            encoding.stream_commit(701, 2020),
        ],
    )

    assert [(r["xid"], r["commit_lsn"], r["ordinal"]) for r in rows] == [
        (702, 2000, 0),
        (703, 2010, 0),
        (701, 2020, 0),
        (701, 2020, 1),
    ]
    assert spool.rows == {}
    assert decoder.open_transaction_count == 0


@pytest.mark.parametrize("place", [None, (5, 6)])
def test_rows_of_an_aborted_subtransaction_never_land(place: tuple[int, int] | None) -> None:
    decoder, _ = streaming()
    wide = encoding.relation(Relation(16400, "shop", "orders", ORDERS.replica_identity, ()))
    rows = decode(
        decoder,
        [
            *block(701, encoding.relation(ORDERS), ROW),
            *block(701, wide, encoding.insert(16400, []), is_first=False, subxid=702),
            encoding.stream_abort(701, 702, place),
            *block(701, encoding.relation(ORDERS), ROW, is_first=False),
            encoding.stream_commit(701, 2000),
        ],
    )
    assert [(r["op"], r["ordinal"], r["relation_version"]) for r in rows] == [
        ("I", 0, 3),
        ("I", 1, 3),
    ]


def test_an_aborted_transaction_leaves_nothing() -> None:
    decoder, spool = streaming()
    messages = [*block(701, encoding.relation(ORDERS), ROW), encoding.stream_abort(701, 701)]
    assert decode(decoder, messages) == []
    assert (spool.rows, decoder.open_transaction_count) == ({}, 0)
    with pytest.raises(ProtocolError, match="never announced"):
        decode(decoder, [encoding.begin(2000, 703), ROW])


def test_a_new_decoder_forgets_the_transactions_of_a_broken_stream() -> None:
    decoder, spool = streaming()
    decode(decoder, block(701, encoding.relation(ORDERS), ROW))
    assert spool.rows
    StreamingDecoder(by_width, spool, FAR)
    assert spool.rows == {}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (block(701, is_first=False), "first block"),
        (block(701) + block(701), "first block"),
        ([encoding.stream_stop()], "outside a block"),
        ([encoding.stream_stop() + b"\0"], "outside a block|follow"),
        (block(701)[:1] + block(702), "inside a block"),
        ([*block(701)[:1], encoding.stream_commit(701, 5)], "inside a block"),
        ([*block(701)[:1], encoding.begin(5, 9)], "not allowed in a block"),
        ([encoding.begin(5, 9), *block(701)], "inside a transaction"),
        ([encoding.stream_commit(701, 5)], "never streamed"),
        ([*block(701), encoding.stream_commit(701, 2**63)], "impossible"),
        ([*block(701), encoding.stream_commit(701, 0)], "impossible"),
        ([*block(0)], "transaction id is 0"),
        ([encoding.stream_start(701, is_first=True), b"I\0\0\x02"], "no transaction id"),
        (block(701, ROW), "never announced"),
        (
            [encoding.begin(9, 1), encoding.commit(9), *block(2), encoding.stream_commit(2, 9)],
            "not above the last",
        ),
    ],
)
def test_messages_out_of_order_are_refused(messages: list[bytes], reason: str) -> None:
    decoder, _ = streaming()
    with pytest.raises(ProtocolError, match=reason) as caught:
        decode(decoder, messages)
    assert caught.value.start is not None


def test_an_error_in_a_block_names_the_table() -> None:
    decoder, _ = streaming()
    short = encoding.with_xid(encoding.relation(ORDERS), 701)[:12]
    with pytest.raises(ProtocolError) as caught:
        decode(decoder, [encoding.stream_start(701, is_first=True), short])
    assert caught.value.message_type == "R"
    decoder, _ = streaming()
    with pytest.raises(ProtocolError, match=r"table 16400") as caught:
        decode(decoder, block(701, ROW))


@pytest.mark.parametrize("subxid", [701, 702])
def test_the_abort_of_a_transaction_without_a_block_is_ignored(subxid: int) -> None:
    """The server sends it for a subtransaction whose rows it has left out."""
    decoder, spool = streaming()
    messages = [
        encoding.stream_abort(701, subxid),
        *block(703, encoding.relation(ORDERS), ROW),
        encoding.stream_abort(701, subxid),
        encoding.stream_commit(703, 5),
    ]
    [row] = decode(decoder, messages)
    assert row["xid"] == 703
    assert spool.rows == {}


def test_an_older_announcement_does_not_return_at_its_transactions_commit() -> None:
    """An ALTER TABLE invalidates pgoutput's entry: a commit marks only valid entries as sent."""
    altered = replace(ORDERS, columns=ORDERS.columns[:1])
    narrow = encoding.insert(16400, [b"1"])
    decoder, _ = streaming()
    rows = decode(
        decoder,
        [
            *block(701, encoding.relation(ORDERS), ROW),
            encoding.begin(1000, 702),
            encoding.relation(altered),
            narrow,
            encoding.commit(1000),
            encoding.stream_commit(701, 1010),
            encoding.begin(1020, 703),
            narrow,
            encoding.commit(1020),
        ],
    )
    assert [(row["op"], row["xid"], row["relation_version"]) for row in rows] == [
        ("I", 702, 1),
        ("I", 701, 3),
        ("I", 703, 1),
    ]


def test_the_later_announcement_of_two_streamed_transactions_is_valid_after_both() -> None:
    altered = replace(ORDERS, columns=ORDERS.columns[:1])
    narrow = encoding.insert(16400, [b"1"])
    for commits in ((701, 702), (702, 701)):
        decoder, _ = streaming()
        rows = decode(
            decoder,
            [
                *block(701, encoding.relation(ORDERS), ROW),
                *block(702, encoding.relation(altered), narrow),
                *[encoding.stream_commit(xid, 1000 + i) for i, xid in enumerate(commits)],
                encoding.begin(1020, 703),
                narrow,
                encoding.commit(1020),
            ],
        )
        assert [row["relation_version"] for row in rows if row["xid"] == 703] == [1]


def test_a_streamed_commit_at_the_windows_end_belongs_to_the_next_window() -> None:
    decoder, spool = streaming(end=2000)
    messages = [
        *block(701, encoding.relation(ORDERS), ROW),
        encoding.stream_commit(701, 2000),
        encoding.keepalive(2001),
    ]
    assert decode(decoder, messages) == []
    assert decoder.is_finished
    rest = decoder.rest
    assert rest is not None
    assert len(rest.starts) == 2
    assert spool.rows

    decoder.begin_window(3000, 2000)
    [batch] = decoder.decode(rest)
    assert batch["xid"].to_pylist() == [701]
    assert not decoder.is_finished


def test_a_keepalive_in_a_block_does_not_end_the_window() -> None:
    decoder, _ = streaming(end=2000)
    start, stop = block(701)
    assert decode(decoder, [start, encoding.keepalive(3000), stop]) == []
    assert not decoder.is_finished
    decode(decoder, [encoding.keepalive(3000)])
    assert decoder.is_finished


def test_warnings_and_parked_rows_of_an_aborted_subtransaction_do_not_count() -> None:
    bad = [encoding.insert(16400, [b"1", b"\xff", None]), ROW[:-1]]
    counts = {
        "shop.orders: values that are not UTF-8, landed as hex": 1,
        "shop.orders: rows that cannot be decoded, parked with their bytes": 1,
    }
    for aborted, expected in ((702, counts), (703, {})):
        decoder, _ = streaming()
        rows = decode(
            decoder,
            [
                *block(701, encoding.relation(ORDERS), ROW),
                *block(701, *bad, is_first=False, subxid=703),
                encoding.stream_abort(701, aborted),
                encoding.stream_commit(701, 2000),
            ],
        )
        assert decoder.warnings == expected
        assert len(decoder.parked) == (1 if expected else 0)
        assert [row["op"] for row in rows] == list("IIP" if expected else "I")
        if expected:
            # The kept bytes are those of the message without its transaction id.
            assert rows[-1]["new"][1] == f"\0\\x{ROW[:-1].hex()}"


def test_a_block_is_decoded_in_parts_of_bounded_values() -> None:
    decoder, spool = streaming(most_values=9)
    decode(decoder, block(701, encoding.relation(ORDERS), *[ROW] * 10))
    assert [batch.num_rows for batch in spool.rows[701]] == [3, 3, 3, 1]


def test_consecutive_blocks_of_a_transaction_are_decoded_together() -> None:
    decoder, spool = streaming()
    announced = encoding.relation(ORDERS)
    blocks = [
        *block(7, announced, ROW),
        *block(7, ROW, is_first=False),
        *block(8, announced, ROW),
        *block(7, ROW, is_first=False),
        *block(7, is_first=False),
        *block(7, ROW, is_first=False),
    ]
    assert decode(decoder, blocks) == []
    assert [rows.num_rows for rows in spool.rows[7]] == [2, 2]
    assert [rows.num_rows for rows in spool.rows[8]] == [1]
