"""Aborts, windows, warnings and errors of streamed transactions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.open_transaction import UncertainMessages
from pgcdc_assets.protocol.relation import Relation, ReplicaIdentity
from pgcdc_assets_tests.protocol.test_decoder import ORDERS
from pgcdc_assets_tests.support.protocol import encoding
from pgcdc_assets_tests.support.protocol.encoding import UNCHANGED
from pgcdc_assets_tests.support.protocol.streaming import Stream, block, places, prepared, whole

ANNOUNCED = encoding.relation(ORDERS)
ROW = encoding.insert(16400, [b"1", b"a", None])
# The same table with its first column only.
NARROW = encoding.relation(replace(ORDERS, columns=ORDERS.columns[:1]))
NARROW_ROW = encoding.insert(16400, [b"1"])
MESSAGE = encoding.logical_message("outbox", b"x")
NOT_TRANSACTIONAL = encoding.logical_message("outbox", b"x", is_transactional=False)


@pytest.mark.parametrize("end", [encoding.stream_commit(701, 2000), b"p"])
def test_a_message_before_the_abort_of_a_subtransaction_is_uncertain(end: bytes) -> None:
    """pgoutput sends it with the id of the top-level transaction, also if it was rolled back."""
    end = encoding.stream_prepare(2000, 701, "g") if end == b"p" else end
    stream = Stream()
    stream.read(
        *block(701, ANNOUNCED, MESSAGE),
        encoding.stream_abort(701, 702),
        encoding.stream_abort(701, 703),
    )
    with pytest.raises(UncertainMessages):
        stream.read(end)


@pytest.mark.parametrize(
    "messages",
    [
        # No abort, no message, or a message that only another stream lands.
        block(701, ANNOUNCED, MESSAGE, ROW),
        [*block(701, ANNOUNCED, ROW, subxid=702), encoding.stream_abort(701, 702)],
        [*block(701, NOT_TRANSACTIONAL), encoding.stream_abort(701, 702)],
        # The message is behind the abort.
        [*block(701), encoding.stream_abort(701, 702), *block(701, MESSAGE, is_first=False)],
        # The abort is of another transaction.
        [*block(704), *block(701, MESSAGE), encoding.stream_abort(704, 705)],
    ],
)
def test_other_messages_are_certain(messages: list[bytes]) -> None:
    rows = Stream().read(*messages, encoding.stream_commit(701, 2000))
    assert [row["op"] for row in rows] == ["M", "I"][: len(rows)]


def test_the_announcements_before_an_abort_are_no_longer_valid() -> None:
    """pgoutput announces the relation again, because the subtransaction may have altered it."""
    stream = Stream()
    stream.read(*block(701, ANNOUNCED, ROW), encoding.stream_abort(701, 702))
    with pytest.raises(ProtocolError, match="relation 16400 was never announced"):
        stream.read(*block(701, ROW, is_first=False))


def test_a_block_of_an_aborted_subtransaction_has_no_rows() -> None:
    stream = Stream()
    stream.read(*block(701, ANNOUNCED, ROW))
    stream.read(*block(701, ROW[:-1], ROW, is_first=False, subxid=702))
    rows = stream.read(encoding.stream_abort(701, 702), encoding.stream_commit(701, 2000))
    assert places(rows) == [(2000, 701, 0)]
    assert stream.decoder.parked == {}


def test_a_relation_of_an_aborted_subtransaction_is_not_completed() -> None:
    """The catalog does not have it after the abort."""
    stream = Stream()
    other = encoding.relation(Relation(16401, "shop", "other", ReplicaIdentity.DEFAULT, ()))
    stream.read(
        *block(701, ANNOUNCED, ROW),
        *block(701, other, encoding.insert(16401, []), is_first=False, subxid=702),
        encoding.stream_abort(701, 702),
        encoding.stream_commit(701, 2000),
    )
    assert stream.completed == [(3, 2000, 701)]


def test_a_row_uses_the_announcement_of_an_aborted_subtransaction() -> None:
    """The announcement is sent in the first subtransaction that uses the relation."""
    stream = Stream()
    rows = stream.read(
        encoding.stream_start(701, is_first=True),
        encoding.with_xid(ANNOUNCED, 702),
        encoding.with_xid(ROW, 702),
        encoding.with_xid(ROW, 701),
        encoding.with_xid(MESSAGE, 701),
        encoding.stream_stop(),
        encoding.stream_commit(701, 2000),
    )
    assert [row["op"] for row in rows] == list("IIM")
    stream = Stream()
    rows = stream.read(
        encoding.stream_start(701, is_first=True),
        encoding.with_xid(ANNOUNCED, 702),
        encoding.with_xid(ROW, 702),
        encoding.with_xid(ROW, 701),
        encoding.stream_stop(),
        encoding.stream_abort(701, 702),
        encoding.stream_commit(701, 2000),
    )
    assert [(row["op"], row["relation_version"]) for row in rows] == [("I", 3)]
    assert stream.completed == [(3, 2000, 701)]


def test_a_transaction_has_rows_of_several_blocks_with_consecutive_ordinals() -> None:
    stream = Stream()
    for number in range(3):
        announced = [ANNOUNCED] if number == 0 else []
        stream.read(*block(701, *announced, ROW, ROW, is_first=number == 0))
    rows = stream.read(encoding.stream_commit(701, 2000))
    assert places(rows) == [(2000, 701, ordinal) for ordinal in range(6)]


def test_a_commit_below_the_windows_start_was_landed() -> None:
    stream = Stream(start=2000)
    bad = encoding.insert(16400, [b"1", b"\xff", None])
    rows = stream.read(
        *block(701, ANNOUNCED, bad),
        encoding.stream_commit(701, 1999),
        *whole(2000, 702, ROW),
        *block(703, ANNOUNCED, ROW),
        encoding.stream_commit(703, 2001),
    )
    assert places(rows) == [(2000, 702, 0), (2001, 703, 0)]
    assert stream.spool.rows == {}
    assert stream.decoder.warnings == {}
    assert stream.decoder.open_transaction_count == 0


def test_messages_behind_the_windows_end_wait_for_the_next_window() -> None:
    stream = Stream(end=2000)
    messages = [
        *whole(1000, 701, ANNOUNCED, ROW),
        *whole(2000, 702, ROW),
        *block(703, ANNOUNCED, ROW),
        encoding.stream_commit(703, 2100),
        *whole(2200, 704, ROW),
    ]
    assert places(stream.read(*messages)) == [(1000, 701, 0)]
    assert stream.decoder.open_transaction_count == 0
    rest = stream.decoder.rest
    # Later batches wait elsewhere.
    assert stream.read(*whole(2300, 705, *[ROW] * 20)) == []
    assert stream.decoder.rest is rest
    stream.decoder.begin_window(3000, 2000)
    assert places(stream.rows(rest)) == [(2000, 702, 0), (2100, 703, 0), (2200, 704, 0)]


def test_whole_transactions_are_decoded_in_parts_of_bounded_values() -> None:
    stream = Stream(most_values=9)
    messages = MessageBatch.of(encoding.stream(whole(1000, 701, ANNOUNCED, *[ROW] * 10)))
    assert [rows.num_rows for rows in stream.decoder.decode(messages)] == [3, 3, 3, 1]


def test_commit_lsns_rise_over_streamed_and_whole_transactions() -> None:
    for messages in (
        [*block(701), encoding.stream_commit(701, 2000), *whole(2000, 702)],
        [*whole(2000, 702), *block(701), encoding.stream_commit(701, 2000)],
        [
            *block(701),
            *block(702),
            encoding.stream_commit(701, 2000),
            encoding.stream_commit(702, 2000),
        ],
    ):
        with pytest.raises(ProtocolError, match="the commit LSN is not above the last one"):
            Stream().read(*messages)


def test_warnings_of_blocks_count_at_the_commit() -> None:
    update = encoding.update(16400, [b"1", b"b", None], [b"1", UNCHANGED, UNCHANGED], b"O")
    bad = encoding.insert(16400, [b"1", b"\xff", None])
    for end, expected in (
        (encoding.stream_abort(701, 701), {}),
        (
            encoding.stream_commit(701, 2000),
            {
                "unchanged TOAST in an old tuple, landed as NULL": 4,
                "shop.orders: values that are not UTF-8, landed as hex": 3,
                "non-transactional logical message, not landed": 2,
            },
        ),
    ):
        stream = Stream()
        stream.read(*block(701, ANNOUNCED, update, bad, NOT_TRANSACTIONAL))
        stream.read(*block(701, bad, update, NOT_TRANSACTIONAL, is_first=False))
        stream.read(*block(701, bad, is_first=False, subxid=702))
        assert stream.decoder.warnings == {}
        stream.read(end)
        assert stream.decoder.warnings == expected


def test_warnings_of_a_block_count_by_subtransaction() -> None:
    bad = encoding.insert(16400, [b"1", b"\xff", b"\xff"])
    stream = Stream()
    inside = [(701, ANNOUNCED), (701, bad), (702, bad), (702, ROW[:-1]), (701, ROW), (703, bad)]
    stream.read(
        encoding.stream_start(701, is_first=True),
        *[encoding.with_xid(message, xid) for xid, message in inside],
        encoding.stream_stop(),
        encoding.stream_abort(701, 702),
        encoding.stream_commit(701, 2000),
    )
    assert stream.decoder.warnings == {"shop.orders: values that are not UTF-8, landed as hex": 4}


def test_the_highest_transaction_ids_are_landed() -> None:
    highest = 2**32 - 1
    rows = Stream().read(
        *block(highest, ANNOUNCED, ROW), encoding.stream_commit(highest, 5), *block(1, ANNOUNCED)
    )
    assert places(rows) == [(5, highest, 0)]


@pytest.mark.parametrize(
    ("damaged", "relation", "reason"),
    [
        (encoding.insert(16400, [])[:3], None, "names no relation"),
        (b"I", None, "names no relation"),
        (encoding.begin(5, 1), None, "not allowed in a block"),
        (encoding.insert(16401, []), 16401, "relation 16401 was never announced"),
        (encoding.truncate([16401]), None, "relation 16401 was never announced"),
        (encoding.type_message(600, "shop", "mood") + b"x", None, "1 bytes follow"),
    ],
)
def test_an_error_in_a_block_has_place_and_table(
    damaged: bytes, relation: int | None, reason: str
) -> None:
    messages = [*block(701, ANNOUNCED, ROW, damaged, ROW), encoding.stream_commit(701, 5)]
    payloads = encoding.stream(messages)
    for cut in (0, 2, 3):
        stream = Stream()
        stream.rows(MessageBatch.of(payloads[:cut]))
        with pytest.raises(ProtocolError, match=reason) as caught:
            stream.rows(MessageBatch.of(payloads[cut:]))
        assert caught.value.start == sum(map(len, payloads[cut:3]))
        assert (caught.value.relation, caught.value.commit_lsn) == (relation, None)


def test_an_error_of_a_known_table_in_a_block_names_it() -> None:
    stream = Stream()
    stream.read(*block(701, ANNOUNCED))
    with pytest.raises(ProtocolError, match="transaction id is 0") as caught:
        stream.read(encoding.stream_start(701, is_first=False), encoding.with_xid(ROW, 0))
    assert (caught.value.relation, caught.value.commit_lsn) == ("shop.orders", None)


def test_an_altered_table_within_a_transaction() -> None:
    stream = Stream()
    rows = stream.read(
        *block(701, ANNOUNCED, ROW, encoding.truncate([16400]), NARROW, NARROW_ROW),
        *block(701, NARROW_ROW, encoding.truncate([16400]), ANNOUNCED, ROW, is_first=False),
        encoding.stream_commit(701, 2000),
        *whole(2010, 702, ROW),
    )
    versions = [(row["op"], row["relation_version"]) for row in rows]
    assert versions == [
        ("I", 3),
        ("T", 3),
        ("I", 1),
        ("I", 1),
        ("T", 1),
        ("I", 3),
        ("I", 3),
    ]


@pytest.mark.parametrize("message", [encoding.stream_stop() + b"\0", b"S\0\0\0\1"])
def test_a_malformed_delimiter_has_its_place(message: bytes) -> None:
    payloads = encoding.stream([encoding.keepalive(1), message])
    with pytest.raises(ProtocolError) as caught:
        Stream().rows(MessageBatch.of(payloads))
    assert caught.value.start == len(payloads[0])


def test_the_end_of_a_block_has_no_field() -> None:
    with pytest.raises(ProtocolError, match="1 bytes follow the last field"):
        Stream().read(encoding.stream_start(701, is_first=True), encoding.stream_stop() + b"\0")


def test_a_delimiter_out_of_order_has_the_offset_of_its_type() -> None:
    with pytest.raises(ProtocolError, match="outside a block") as caught:
        Stream().read(encoding.stream_stop())
    assert (caught.value.message_type, caught.value.offset, caught.value.start) == ("E", 25, 0)


def test_an_older_announcement_does_not_replace_that_of_a_prepared_transaction() -> None:
    stream = Stream()
    rows = stream.read(
        *block(703, NARROW, NARROW_ROW),
        *prepared(1000, 701, "g", ANNOUNCED, ROW),
        # Its row completes the relation.
        *whole(1100, 702, ROW),
        encoding.stream_commit(703, 1200),
        *whole(1300, 704, ROW),
    )
    versions = [(row["xid"], row["relation_version"]) for row in rows]
    assert versions == [(702, 3), (703, 1), (704, 3)]
