"""Splitting of bytes into messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import frames
from pgcdc_assets_tests.support.protocol import encoding

# Payloads with many bytes that look like the head of a frame.
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


@settings(max_examples=300, deadline=None)
@given(_payloads, st.integers(0, 300))
def test_every_complete_frame_is_found_wherever_the_bytes_break_off(
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


def test_a_message_of_more_than_sixteen_megabytes_is_one_frame() -> None:
    long = b"w" + bytes(17 * 1024 * 1024)
    data = encoding.frame(b"w1") + encoding.frame(long) + encoding.frame(b"w2")

    found = frames.cut(buffer_of(data), 0, len(data))

    assert [len(payload) for payload in payloads_of(found.batch)] == [2, len(long), 2]


def test_an_incomplete_frame_gives_its_number_of_bytes() -> None:
    data = encoding.frame(b"w" + bytes(1000))[:100]

    found = frames.cut(buffer_of(data), 0, len(data))

    assert (found.consumed, found.needed, found.other) == (0, 1006, None)


def test_a_frame_that_is_no_copy_data_stops_the_cut() -> None:
    data = encoding.frame(b"w1") + encoding.frame(b"", b"c") + encoding.frame(b"w2")

    found = frames.cut(buffer_of(data), 0, len(data))

    assert payloads_of(found.batch) == [b"w1"]
    assert (found.consumed, found.other) == (7, b"c")


def test_an_impossible_length_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="impossible"):
        frames.cut(buffer_of(b"d\xff\xff\xff\xffw"), 0, 6)


# A row's bytes: never a raw zero, and a newline only at its end.
_rows = st.lists(
    st.one_of(
        st.sampled_from([b"d", b"dd\td", b"", b"\\n", b"d" * 2660]),
        st.binary(max_size=20).map(lambda row: row.replace(b"\0", b"d").replace(b"\n", b"d")),
    ).map(lambda row: row + b"\n"),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(_rows, st.integers(0, 3000))
def test_every_complete_row_is_found_wherever_the_bytes_break_off(
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


def test_rows_whose_frames_look_like_the_end_of_a_row_are_cut_by_their_lengths() -> None:
    """The lengths 0x0A64 and 0x0A6400 hold a newline and the letter d."""
    rows = [b"x" * (length - 5) + b"\n" for length in (0x0A64, 0x0A6400, 0x64, 0x0A00)]
    data = b"".join(encoding.frame(row) for row in rows)
    assert payloads_of(frames.cut_rows(buffer_of(data), 0, len(data)).batch) == rows


def test_a_row_of_more_than_sixteen_megabytes_is_one_frame() -> None:
    rows = [b"a\n", b"x" * (17 * 1024 * 1024) + b"\n", b"b\n"]
    data = b"".join(encoding.frame(row) for row in rows)
    assert payloads_of(frames.cut_rows(buffer_of(data), 0, len(data)).batch) == rows
