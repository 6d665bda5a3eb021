"""Conversion of texts from the encoding of their database to UTF-8.

A server that converts a text for its client ends the stream, or the COPY, at a value without a form
in UTF-8. Without this conversion by the server, the value arrives as stored. The characters are
then converted here, by a table that the server fills: its own conversion decides about each
character. In all encodings of databases, a byte below 0x80 is an ASCII character, and no other
character contains such a byte
(https://www.postgresql.org/docs/current/multibyte.html, "Supported Character Sets").

A value with a character that the server cannot convert is returned as `utf8.RAW` and the bytes as
stored, which `utf8.with_hex` writes as hex.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from pgcdc_assets.protocol import utf8

ConvertCharacters = Callable[[Sequence[bytes]], Sequence[bytes | None]]

# One character by its length in bytes (pg_euc_mblen and others in src/common/wchar.c). The last
# alternative is the rest of a character that is cut short. No connection to a database of
# MULE_INTERNAL is possible: the server has no conversion of it to UTF-8.
_THREE_BYTES = rb"\x8f..|"
_TWO_BYTES = rb"[\x80-\xff].|[\x80-\xff]"
_CHARACTERS = {
    "EUC_CN": _TWO_BYTES,
    "EUC_JP": _THREE_BYTES + _TWO_BYTES,
    "EUC_JIS_2004": _THREE_BYTES + _TWO_BYTES,
    "EUC_KR": _THREE_BYTES + _TWO_BYTES,
    "EUC_TW": rb"\x8e...|" + _THREE_BYTES + _TWO_BYTES,
}
_ONE_BYTE = rb"[\x80-\xff]"

_UTF8, _SQL_ASCII = "UTF8", "SQL_ASCII"


def needs_conversion(encoding: str) -> bool:
    """Return whether a server with this encoding converts texts for a client of UTF-8."""
    return encoding not in (_UTF8, _SQL_ASCII)


class StoredEncoding:
    """The encoding of a database that `needs_conversion`.

    Args:
        name: Postgres's name of the encoding.
        convert: function that returns the UTF-8 bytes of each character; None for a character that
            the server cannot convert.
    """

    def __init__(self, name: str, convert: ConvertCharacters) -> None:
        self.name = name
        self._convert = convert
        self._characters = re.compile(_CHARACTERS.get(name, _ONE_BYTE), re.DOTALL)
        self._known: dict[bytes, bytes] = {}
        self._unknown: set[bytes] = set()
        # Of an encoding with one byte per character: the characters, and their lengths in UTF-8.
        self._decoding = ""
        self._lengths = np.ones(256, np.int64)

    def convert(self, values: Sequence[bytes]) -> list[bytes]:
        """Return the values in UTF-8, or after `utf8.RAW` unchanged."""
        self._learn(values)
        return [self._convert_one(value) for value in values]

    def convert_array(self, values: pa.LargeStringArray) -> pa.LargeStringArray:
        """Return the values of an array in UTF-8, or after `utf8.RAW` unchanged.

        Args:
            values: the array; not a slice of another array.
        """
        count = len(values)
        validity, offset_buffer, data_buffer = values.buffers()
        if not count or data_buffer is None:
            return values
        offsets = np.frombuffer(offset_buffer, np.int64, count + 1)
        data = np.frombuffer(data_buffer, np.uint8)[: offsets[-1]]
        high = np.flatnonzero(data >= 0x80)
        if not len(high):
            return values
        if self.name not in _CHARACTERS:
            unknown = np.frombuffer(self.unknown_bytes(), np.uint8)
            if not np.isin(data[high], unknown).any():
                return self._convert_bytes(data, offsets, validity)
        owners = np.unique(np.searchsorted(offsets, high, side="right") - 1)
        is_owner = np.zeros(count, np.bool_)
        is_owner[owners] = True
        raw = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), count, [None, offset_buffer, data_buffer]
        )
        # Many rows have the same few values.
        distinct = raw.filter(pa.array(is_owner)).dictionary_encode()
        converted = pa.array(self.convert(distinct.dictionary.to_pylist()), pa.large_binary())
        places = np.arange(count)
        places[is_owner] = count + np.arange(len(owners))
        both = pa.concat_arrays([raw, converted.take(distinct.indices)]).take(pa.array(places))
        _, new_offsets, new_data = both.buffers()
        return pa.LargeStringArray.from_buffers(count, new_offsets, new_data, validity)

    def unknown_bytes(self) -> bytes:
        """Return the bytes without a form in UTF-8; none if a character may have several bytes."""
        if self.name in _CHARACTERS:
            return b""
        self._learn_bytes()
        return b"".join(sorted(self._unknown))

    def _convert_bytes(
        self, data: utf8.Bytes, offsets: utf8.Positions, validity: pa.Buffer | None
    ) -> pa.LargeStringArray:
        """Convert values of an encoding with one byte per character, all of them known."""
        text, _ = codecs.charmap_decode(data.tobytes(), "strict", self._decoding)
        ends = np.zeros(len(data) + 1, np.int64)
        np.cumsum(self._lengths[data], out=ends[1:])
        return pa.LargeStringArray.from_buffers(
            len(offsets) - 1, pa.py_buffer(ends[offsets]), pa.py_buffer(text.encode()), validity
        )

    def _learn(self, values: Iterable[bytes]) -> None:
        found = set(chain.from_iterable(map(self._characters.findall, values)))
        new = sorted(found - self._known.keys() - self._unknown)
        if not new:
            return
        for character, converted in zip(new, self._convert(new), strict=True):
            if converted is None:
                self._unknown.add(character)
            else:
                self._known[character] = converted

    def _learn_bytes(self) -> None:
        """Read the table of an encoding with one byte per character."""
        if self._decoding:
            return
        high = [bytes((byte,)) for byte in range(0x80, 0x100)]
        self._learn(high)
        # U+FFFE is the mark of an undefined character in a table of `codecs.charmap_decode`.
        texts = [self._known.get(byte, b"\xef\xbf\xbe") for byte in high]
        self._decoding = "".join(map(chr, range(0x80))) + b"".join(texts).decode()
        self._lengths[0x80:] = list(map(len, texts))

    def _convert_one(self, value: bytes) -> bytes:
        try:
            return self._characters.sub(lambda found: self._known[found[0]], value)
        except KeyError:
            return utf8.RAW + value
