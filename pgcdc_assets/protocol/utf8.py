r"""Conversion of values that are not UTF-8 to text.

A database of encoding SQL_ASCII accepts any bytes except zero bytes, and a logical message accepts
any bytes. The raw zone keeps a value that is not UTF-8 as U+0000, `\x` and the bytes in lower-case
hex. A Postgres text contains no U+0000, so the conversion is unambiguous: no text equals a
converted value, and two different values remain different.
"""

from __future__ import annotations

import binascii

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

MARK = "\0\\x"

# Before a value: its bytes are no UTF-8, although they may look like UTF-8. No value of a database
# contains a zero byte.
RAW = b"\xff\0"

_MARK_BYTES = np.frombuffer(MARK.encode(), np.uint8)

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]

# Per lead byte: the number of continuation bytes, and the range of the first continuation byte
# (The Unicode Standard, table 3-7, https://www.unicode.org/versions/latest/).
_FOLLOWERS = np.zeros(256, np.int64)
_LOWEST = np.full(256, 0x80, np.uint8)
_HIGHEST = np.full(256, 0xBF, np.uint8)
_FOLLOWERS[0xC2:0xE0], _FOLLOWERS[0xE0:0xF0], _FOLLOWERS[0xF0:0xF5] = 1, 2, 3
_LOWEST[0xE0], _LOWEST[0xF0] = 0xA0, 0x90
_HIGHEST[0xED], _HIGHEST[0xF4] = 0x9F, 0x8F


def bytes_as_text(data: bytes) -> str:
    """Return bytes that are not UTF-8 as U+0000, `\\x` and hex digits."""
    return MARK + data.hex()


def text_of_bytes(data: bytes) -> str:
    """Return any bytes as text. Bytes that are not UTF-8 or begin with U+0000 become hex."""
    if not data.startswith(b"\0"):
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass
    return bytes_as_text(data)


def count_hex(tuples: pa.ListArray) -> int:
    """Return the number of values written as hex in lists of texts."""
    return pc.sum(pc.starts_with(tuples.flatten(), MARK)).as_py() or 0


def find_invalid(values: pa.LargeStringArray) -> Flags:
    """Return a flag per value: the value is not UTF-8.

    A value is UTF-8 if every lead byte has its continuation bytes, in the right range, and if the
    number of continuation bytes is the sum that the lead bytes require.
    """
    count = len(values)
    _, offset_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64, count + 1, values.offset * 8)
    invalid = np.zeros(count, np.bool_)
    if data_buffer is None:
        return invalid
    data = np.frombuffer(data_buffer, np.uint8)[: offsets[-1]]
    high = np.flatnonzero(data[offsets[0] :] >= 0x80) + offsets[0]
    if len(high) == 0:
        return invalid
    owners = np.searchsorted(offsets, high, side="right") - 1
    ends = offsets[owners + 1]
    codes = data[high]
    is_follower = codes < 0xC0
    followers = _FOLLOWERS[codes]
    is_good = is_follower | ((followers > 0) & (high + followers < ends))
    # Padded with zeros: behind a lead byte at the very end, a zero is no continuation byte.
    padded = np.concatenate((data, np.zeros(3, np.uint8)))
    first = padded[high + 1]
    is_lead = ~is_follower
    is_good &= ~is_lead | ((first >= _LOWEST[codes]) & (first <= _HIGHEST[codes]))
    for distance in (2, 3):
        follower = padded[high + distance]
        is_good &= ~is_lead | (followers < distance) | ((follower & 0xC0) == 0x80)
    invalid[owners[~is_good]] = True
    # A continuation byte without a lead byte makes the count exceed the required sum.
    wanted = np.bincount(owners[is_lead], followers[is_lead], count)
    invalid |= np.bincount(owners[is_follower], minlength=count) != wanted
    return invalid


def with_hex(values: pa.LargeStringArray, chosen: Flags) -> pa.LargeStringArray:
    """Return the values with the chosen values converted to hex. NULLs remain NULL."""
    count = len(values)
    validity, offset_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64, count + 1, values.offset * 8)
    raw = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), count, [None, pa.py_buffer(offsets), data_buffer]
    )
    replaced = [value.removeprefix(RAW) for value in raw.filter(pa.array(chosen)).to_pylist()]
    lengths = np.fromiter(map(len, replaced), np.int64, len(replaced))
    hex_digits = np.frombuffer(binascii.hexlify(b"".join(replaced)), np.uint8)
    new_lengths = 2 * lengths + len(_MARK_BYTES)
    ends = np.cumsum(new_lengths)
    text = np.empty(int(ends[-1]), np.uint8)
    marks = (ends - new_lengths)[:, None] + np.arange(len(_MARK_BYTES))
    is_digit = np.ones(len(text), np.bool_)
    is_digit[marks.ravel()] = False
    text[marks] = _MARK_BYTES
    text[is_digit] = hex_digits
    written = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        len(lengths),
        [None, pa.py_buffer(np.concatenate(([0], ends)).astype(np.int64)), pa.py_buffer(text)],
    )
    places = np.arange(count)
    places[chosen] = count + np.arange(len(lengths))
    both = pa.concat_arrays([raw, written]).take(pa.array(places))
    _, new_offsets, new_data = both.buffers()
    if values.offset and validity is not None:
        valid = np.array(values.is_valid())
        validity = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.LargeStringArray.from_buffers(count, new_offsets, new_data, validity)
