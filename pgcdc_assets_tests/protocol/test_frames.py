"""Splitting of bytes into messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import frames
from pgcdc_assets_tests.support.protocol import encoding

# Payloads with many bytes that look like the header of a frame.
_payloads = st.lists(
    st.one_of(
        st.binary(max_size=20).map(lambda data: b"w" + data),
        st.sampled_from(
            [b"wd\0\0\0\x05w", b"kd\0\0\0\x06kx", b"wd\0\0\0\0wd\0\0\0\x04k", b"x", b""]
        ),
    ),
    max_size=12,
)


def buffer_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data + bytes(frames.SLACK_BYTES), np.uint8)


def payloads_of(batch: frames.MessageBatch) -> list[bytes]:
    return [
        batch.buffer[start:end].tobytes()
        for start, end in zip(batch.starts, batch.ends, strict=True)
    ]


def test_the_size_of_a_batch_has_the_heads_of_its_messages() -> None:
    """A head has a type of one byte and a length of four."""
    assert frames.MessageBatch.of([]).size_bytes == 0
    assert frames.MessageBatch.of([b"abc", b"", b"de"]).size_bytes == 3 + 2 + 3 * 5


@settings(max_examples=300, deadline=None)
@given(_payloads, st.integers(0, 300))
def test_every_complete_frame_is_found_for_any_end_of_the_bytes(
    payloads: list[bytes], length: int
) -> None:
    data = b"".join(encoding.frame(payload) for payload in payloads)[:length]
    expected, position = [], 0
    while position + 5 <= len(data):
        end = position + 1 + int.from_bytes(data[position + 1 : position + 5], "big")
        if end > len(data):
            break
        expected.append(data[position + 5 : end])
        position = end

    found = frames.cut(buffer_of(data), 0, len(data))

    # A frame without a payload at the end of the buffer may be found with the next bytes.
    assert payloads_of(found.batch) in (expected, expected[:-1])
    if len(expected) != len(payloads_of(found.batch)):
        assert expected[-1] == b""


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize("missing_bytes", [0, 1, 4, 5, 6, 7])
def test_ordinary_messages_are_found_without_following_their_lengths(
    start: int, missing_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To follow each length would cost more than to decode the messages."""

    def refuse(buffer: frames.Bytes, start: int, end: int) -> None:
        raise AssertionError("each length is followed")

    monkeypatch.setattr(frames, "_walk", refuse)
    # Lengths of one, two and three bytes, and headers at both sides of a block's border.
    lengths = [1, 40, 255, 256, 70_000, 131_072 - 5, *range(1, 40), 300_000, 9]
    payloads = [b"w" + b"d" * length for length in lengths]
    # Each value has some bytes of a header, at the same distances.
    payloads[3:3] = [encoding.keepalive(7), b"w" + b"d2345w\x002345w" * 5, b"w" + b"d\x00345x" * 5]
    data = bytes(start) + b"".join(map(encoding.frame, payloads))
    whole = payloads if missing_bytes == 0 else payloads[:-1]

    found = frames.cut(buffer_of(data), start, len(data) - missing_bytes)

    assert payloads_of(found.batch) == whole
    assert found.consumed == start + sum(5 + len(payload) for payload in whole)
    assert found.needed == (0 if missing_bytes == 0 else 15)


def test_messages_before_another_kind_of_message_are_found_without_their_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "_walk", None)
    data = b"".join(map(encoding.frame, [b"w1", b"w2"])) + encoding.frame(b"an error", b"E")

    found = frames.cut(buffer_of(data), 0, len(data))

    assert payloads_of(found.batch) == [b"w1", b"w2"]
    assert found.other == b"E"


def test_a_long_message_after_ordinary_ones_is_found() -> None:
    long = b"w" + bytes(17 * 1024 * 1024)
    data = b"".join(map(encoding.frame, [b"w1", b"w2", b"w3", long]))

    found = frames.cut(buffer_of(data), 0, len(data))

    assert [len(payload) for payload in payloads_of(found.batch)] == [2, 2, 2, len(long)]


@pytest.mark.parametrize("length", range(6))
def test_an_incomplete_message_waits_for_the_rest(length: int) -> None:
    data = b"1234567" + encoding.frame(b"w1")[:length]

    found = frames.cut(buffer_of(data), 7, len(data))

    assert payloads_of(found.batch) == []
    assert (found.consumed, found.needed, found.other) == (7, 7 if length == 5 else 0, None)
    assert found.batch.starts.dtype == found.batch.ends.dtype == np.int64


def test_a_message_of_more_than_sixteen_megabytes_is_one_frame() -> None:
    long = b"w" + bytes(17 * 1024 * 1024)
    data = encoding.frame(b"w1") + encoding.frame(long) + encoding.frame(b"w2")

    found = frames.cut(buffer_of(data), 0, len(data))

    assert [len(payload) for payload in payloads_of(found.batch)] == [2, len(long), 2]


def test_an_incomplete_frame_gives_its_number_of_bytes() -> None:
    data = encoding.frame(b"w" + bytes(1000))[:100]

    found = frames.cut(buffer_of(data), 0, len(data))

    assert (found.consumed, found.needed, found.other) == (0, 1006, None)


def test_only_a_complete_frame_of_another_kind_is_reported() -> None:
    whole, other = encoding.frame(b"w1"), encoding.frame(b"an error", b"E")
    for data, is_other in (
        (whole + other, True),
        (whole + other[:-1], False),
        (whole + encoding.frame(b""), False),
    ):
        found = frames.cut(buffer_of(data), 0, len(data))
        assert found.other == (b"E" if is_other else None)


def test_a_frame_without_copy_data_ends_the_search() -> None:
    data = encoding.frame(b"w1") + encoding.frame(b"", b"c") + encoding.frame(b"w2")

    found = frames.cut(buffer_of(data), 0, len(data))

    assert payloads_of(found.batch) == [b"w1"]
    assert (found.consumed, found.other) == (7, b"c")


@pytest.mark.parametrize("kind", [b"d", b"\x01"])
@pytest.mark.parametrize("length", [0, 3, 2**31, 2**32 - 1])
def test_an_impossible_length_is_a_protocol_error(kind: bytes, length: int) -> None:
    with pytest.raises(ProtocolError, match="impossible") as caught:
        frames.cut(buffer_of(kind + length.to_bytes(4, "big") + b"w"), 0, 6)
    assert caught.value.message_type == {b"d": "d", b"\x01": r"\x01"}[kind]
    assert caught.value.offset == 1


@pytest.mark.parametrize("length", [4, 2**31 - 1])
def test_the_least_and_the_greatest_length_are_possible(length: int) -> None:
    found = frames.cut(buffer_of(b"E" + length.to_bytes(4, "big") + b"w"), 0, 6)

    assert found.needed == length + 1
    assert found.other == (b"E" if length == 4 else None)


# The bytes of a row have no zero, and a newline only at the end.
_rows = st.lists(
    st.one_of(
        st.sampled_from([b"d", b"dd\td", b"", b"\\n", b"d" * 2660]),
        st.binary(max_size=20).map(lambda row: row.replace(b"\0", b"d").replace(b"\n", b"d")),
    ).map(lambda row: row + b"\n"),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(_rows, st.integers(0, 3000))
def test_every_complete_row_is_found_for_any_end_of_the_bytes(
    rows: list[bytes], length: int
) -> None:
    data = b"".join(encoding.frame(row) for row in rows)[:length]
    complete, size = [], 0
    for row in rows:
        size += frames.HEAD_BYTES + len(row)
        if size <= length:
            complete.append(row)
    found = frames.cut_rows(buffer_of(data), 0, len(data))
    assert payloads_of(found.batch) == complete
    assert found.consumed == sum(frames.HEAD_BYTES + len(row) for row in complete)


def test_frames_that_look_like_the_end_of_a_row_are_separated_by_their_lengths() -> None:
    """The lengths 0x0A64 and 0x0A6400 hold a newline and the letter d."""
    rows = [b"x" * (length - 5) + b"\n" for length in (0x0A64, 0x0A6400, 0x64, 0x0A00)]
    data = b"".join(encoding.frame(row) for row in rows)
    assert payloads_of(frames.cut_rows(buffer_of(data), 0, len(data)).batch) == rows


def test_a_row_of_more_than_sixteen_megabytes_is_one_frame() -> None:
    rows = [b"a\n", b"x" * (17 * 1024 * 1024) + b"\n", b"b\n"]
    data = b"".join(encoding.frame(row) for row in rows)
    assert payloads_of(frames.cut_rows(buffer_of(data), 0, len(data)).batch) == rows


@pytest.mark.parametrize("missing_bytes", [0, 3])
def test_rows_are_found_without_following_their_lengths(
    missing_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length 0x6400 holds the letter d before a zero, as at the head of a frame."""
    monkeypatch.setattr(frames, "_walk", None)
    rows = [b"x" * (length - 5) + b"\n" for length in (0x6400, 0x64, 0x6400, 7)]
    data = b"".join(encoding.frame(row) for row in rows)
    found = frames.cut_rows(buffer_of(data), 0, len(data) - missing_bytes)
    assert payloads_of(found.batch) == (rows[:-1] if missing_bytes else rows)


def test_a_frame_without_a_payload_is_found_at_the_end_of_the_bytes() -> None:
    data = encoding.frame(b"")
    found = frames.cut(buffer_of(data), 0, len(data))
    assert (payloads_of(found.batch), found.consumed) == ([b""], 5)
