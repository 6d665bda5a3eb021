"""A non-transactional message lands once, wherever streams begin and windows end."""

from __future__ import annotations

import datetime as dt
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.arrow_batch import DECODED
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.logical_messages import MessageSelection, NonTransactionalMessages
from pgcdc_assets_tests.protocol.test_streaming_decoder import streaming
from pgcdc_assets_tests.support.protocol import encoding
from pgcdc_assets_tests.support.protocol.streaming import block

ALL = MessageSelection(non_transactional=True)


def message(lsn: int, content: bytes, prefix: bytes = b"p", sent_us: int = 0) -> bytes:
    """Return XLogData with a non-transactional message whose record ends at an LSN.

    `sent_us` are microseconds since 2000.
    """
    head = struct.pack("!Bq", 0, lsn) + prefix + b"\0"
    data = b"M" + head + struct.pack("!i", len(content)) + content
    return b"w" + struct.pack("!QQq", lsn, lsn, sent_us) + data


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
    payloads = [encoding.keepalive(1), message(7000, b""), bytes(damaged)]
    reason = "the LSN is not the LSN of the message's head"
    with pytest.raises(ProtocolError, match=reason) as caught:
        list(decoder.decode(MessageBatch.of(payloads)))
    error = caught.value
    # The flags are at offset 1 of the message, and the LSN follows.
    assert (error.message_type, error.offset) == ("M", 2)
    assert error.start == sum(map(len, payloads[:2]))


@pytest.mark.parametrize("sent_us", [2**62, -(2**62)])
def test_a_message_that_was_sent_at_an_impossible_time_is_refused(sent_us: int) -> None:
    decoder, _ = streaming(messages=NonTransactionalMessages(ALL))
    with pytest.raises(ProtocolError, match="the time is outside the years 1 to 9999") as caught:
        list(decoder.decode(MessageBatch.of([message(8000, b"", sent_us=sent_us)])))
    assert (caught.value.message_type, caught.value.start) == ("M", 0)


def test_the_row_of_a_message_without_a_transaction() -> None:
    """It has neither a transaction nor a table. Its time is that of the sending."""
    decoder, _ = streaming(messages=NonTransactionalMessages(ALL))
    texts = [b"", b"x\xff", "é".encode()]
    payloads = [
        message(8000 + 8 * i, text, "ü".encode(), sent_us=i - 1) for i, text in enumerate(texts)
    ]
    [batch] = decoder.decode(MessageBatch.of(payloads))
    assert batch.schema == DECODED
    batch.validate(full=True)
    epoch = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
    assert batch.to_pylist() == [
        dict.fromkeys(DECODED.names)
        | {
            "commit_lsn": 7999 + 8 * i,
            "ordinal": 0,
            "xid": 0,
            "commit_ts": epoch + dt.timedelta(microseconds=i - 1),
            "op": "M",
            "new": ["ü", text],
        }
        for i, text in enumerate(["", "\0\\x78ff", "é"])
    ]
    assert decoder.messages.landed_through == 8016


def test_messages_beside_the_windows_end_share_its_last_position() -> None:
    """A record that ends behind the window's end, and may begin before, belongs to the window."""
    decoder, _ = streaming(9000, messages=NonTransactionalMessages(ALL))
    lsns = [8900, 8960, 9024, 9080]
    payloads = [message(lsn, b"", b"") for lsn in lsns]
    [batch] = decoder.decode(MessageBatch.of(payloads))
    places = [(row["commit_lsn"], row["ordinal"]) for row in batch.to_pylist()]
    assert places == [(8899, 0), (8959, 0), (8999, 0), (8999, 1)]
    [batch] = decoder.decode(MessageBatch.of([message(9088, b"", b"")]))
    assert batch["ordinal"].to_pylist() == [2]
    assert not decoder.is_finished

    decoder.begin_window(10000, 9000)
    # The server sends the messages again to a stream from the window's end.
    [batch] = decoder.decode(MessageBatch.of([*payloads, message(9160, b"", b"")]))
    assert [(row["commit_lsn"], row["ordinal"]) for row in batch.to_pylist()] == [(9159, 0)]


def test_a_message_behind_the_windows_end_ends_the_window() -> None:
    decoder, _ = streaming(9000, messages=NonTransactionalMessages(ALL))
    payloads = [message(8000, b"in"), message(20000, b"behind"), encoding.keepalive(20000)]
    [batch] = decoder.decode(MessageBatch.of(payloads))
    assert batch["commit_lsn"].to_pylist() == [7999]
    assert decoder.is_finished
    rest = decoder.rest
    assert rest is not None
    assert rest.starts[0] == len(payloads[0])
    decoder.begin_window(30000, 9000)
    [batch] = decoder.decode(rest)
    assert batch["commit_lsn"].to_pylist() == [19999]


def test_a_message_of_many_pages_of_the_wal_may_begin_before_the_windows_end() -> None:
    """Each page has a head, so a record is longer than its content."""
    size = 1_000_000
    # A page of 8 KB has 8,168 bytes of records. The record begins 8 bytes before the end.
    end = (9_000_000 - 8 + size + 60 + 24 * (size // 8168) + 7) // 8 * 8
    decoder, _ = streaming(9_000_000, messages=NonTransactionalMessages(ALL))
    [batch] = decoder.decode(MessageBatch.of([message(end, b"x" * size)]))
    assert batch["commit_lsn"].to_pylist() == [8_999_999]


@pytest.mark.parametrize("prefix", ["é" * 300, "p" * 300])
def test_a_message_whose_prefix_is_longer_in_the_wal_may_begin_before_the_windows_end(
    prefix: str,
) -> None:
    """EUC_JP has three bytes for a letter with an accent, and UTF-8 has two."""
    size = 64 + len(prefix.encode("euc_jp"))
    end = 9_000_000 - 8 + (size + 7) // 8 * 8
    decoder, _ = streaming(9_000_000, messages=NonTransactionalMessages(ALL))
    [batch] = decoder.decode(MessageBatch.of([message(end, b"", prefix.encode())]))
    assert batch["commit_lsn"].to_pylist() == [8_999_999]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("non_transactional", [False, True])
def test_only_selected_messages_and_heartbeats_land(
    is_streamed: bool, non_transactional: bool
) -> None:
    selection = MessageSelection(frozenset({b"outbox", b"b"}), non_transactional)
    decoder, _ = streaming(messages=NonTransactionalMessages(selection))
    inside = [
        encoding.logical_message(prefix, prefix.encode())
        for prefix in ("outbox", "other", "b", "pgcdc", "", "outbox2")
    ]
    within = [encoding.begin(8500, 700), *inside, encoding.commit(8500)]
    if is_streamed:
        within = [*block(700, *inside), encoding.stream_commit(700, 8500)]
    payloads = [
        message(8000, b"1", b"outbox"),
        message(8040, b"2", b"other"),
        *encoding.stream(within),
        message(8600, b"3", b"pgcdc"),
    ]
    rows = [row for rows in decoder.decode(MessageBatch.of(payloads)) for row in rows.to_pylist()]
    texts = [(row["xid"], *row["new"]) for row in rows]
    assert sorted(texts) == [
        *([(0, "outbox", "1"), (0, "pgcdc", "3")] if non_transactional else []),
        (700, "b", "b"),
        (700, "outbox", "outbox"),
        (700, "pgcdc", "pgcdc"),
    ]
    assert sum(decoder.warnings.values()) == (0 if non_transactional else 3)
    # A message that is not selected has landed too: a later stream need not look at it.
    assert decoder.messages.landed_through == (8600 if non_transactional else 0)


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
