"""A non-transactional message lands once, wherever streams begin and windows end."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.logical_messages import MessageSelection, NonTransactionalMessages
from pgcdc_assets_tests.protocol.test_streaming_decoder import streaming
from pgcdc_assets_tests.support.protocol import encoding

ALL = MessageSelection(non_transactional=True)


def message(lsn: int, content: bytes, prefix: bytes = b"p") -> bytes:
    """Return XLogData with a non-transactional message whose record ends at an LSN."""
    head = struct.pack("!Bq", 0, lsn) + prefix + b"\0"
    return encoding.xlog_data(b"M" + head + struct.pack("!i", len(content)) + content, lsn)


@st.composite
def records(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """Draw start, end and message of records in the WAL."""
    found, position = [], draw(st.integers(1000, 1100)) * 8
    for number in range(draw(st.integers(1, 6))):
        content = f"{number}".encode() + b"x" * draw(st.sampled_from([0, 3, 100, 900]))
        # The heads, an origin, the id of a top-level transaction, and heads of WAL pages.
        size = 53 + 2 + len(content) + draw(st.sampled_from([0, 3, 8, 24, 32]))
        end = (position + size + 7) // 8 * 8
        found.append((position, end, message(end, content)))
        position = end + 8 * draw(st.sampled_from([0, 0, 5, 100]))
    return found


@settings(max_examples=150, deadline=None)
@given(records(), st.data())
def test_each_message_lands_once_in_order_over_streams_and_windows(
    sent: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    first, last = sent[0][0], sent[-1][1] + 64
    borders = data.draw(st.sets(st.integers(first + 1, last - 1), max_size=8))
    start, through = first, 0
    landed: list[tuple[int, int, str]] = []
    decoder = None
    for end in [*sorted(borders), last]:
        if decoder is None or data.draw(st.booleans()):
            # A new stream: the server skips the records below its start.
            messages = NonTransactionalMessages(ALL, through)
            decoder, _ = streaming(end, window_start=start, messages=messages)
            hand = [data for begin, _, data in sent if begin >= start]
        else:
            decoder.begin_window(end, start)
        for number, payload in enumerate(hand):
            for rows in decoder.decode(MessageBatch.of([payload])):
                landed += [
                    (row["commit_lsn"], row["ordinal"], row["new"][1]) for row in rows.to_pylist()
                ]
                assert all(start <= row["commit_lsn"] < end for row in rows.to_pylist())
            if decoder.is_finished:
                hand = hand[number:]
                break
        else:
            hand = []
        if decoder.messages.landed_through > end:
            through = decoder.messages.landed_through
        start = end
    contents = [text for *_, text in landed]
    assert contents == [payload[41:].decode() for *_, payload in sent]
    places = [(lsn, ordinal) for lsn, ordinal, _ in landed]
    assert places == sorted(set(places))


def test_a_message_with_another_lsn_than_its_head_is_refused() -> None:
    decoder, _ = streaming(messages=NonTransactionalMessages(ALL))
    damaged = bytearray(message(8000, b"content"))
    damaged[1:9] = struct.pack("!Q", 2**62)
    with pytest.raises(ProtocolError, match="the LSN is not the LSN of the message's head"):
        list(decoder.decode(MessageBatch.of([bytes(damaged)])))


def test_a_message_cut_at_any_byte_is_a_protocol_error() -> None:
    whole = message(8000, b"content")
    for length in range(26, len(whole)):
        decoder, _ = streaming(messages=NonTransactionalMessages(ALL))
        with pytest.raises(ProtocolError):
            list(decoder.decode(MessageBatch.of([whole[:length]])))


def test_messages_among_transactions_are_read_apart_up_to_the_windows_end() -> None:
    decoder, _ = streaming(9000, messages=NonTransactionalMessages(ALL))
    begin, commit = encoding.begin, encoding.commit
    payloads = [
        message(8000, b"first"),
        *map(encoding.xlog_data, (begin(8500, 700), commit(8500))),
        message(8600, b"second"),
        *map(encoding.xlog_data, (begin(9000, 701), commit(9000))),
        message(9008, b"behind a commit of the next window"),
    ]
    [rows] = decoder.decode(MessageBatch.of(payloads))
    assert [row["new"][1] for row in rows.to_pylist()] == ["first", "second"]
    assert decoder.rest is not None
    rest = decoder.rest
    decoder.begin_window(10000, 9000)
    [rows] = decoder.decode(rest)
    assert [row["commit_lsn"] for row in rows.to_pylist()] == [9007]
