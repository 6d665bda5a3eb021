"""Texts in the encoding of their database, compared with the server's conversion of whole texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.protocol import utf8
from pgcdc_assets.protocol.encodings import StoredEncoding, needs_conversion
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.encoded import converting

pytestmark = pytest.mark.postgres

# Bytes that begin a character of two, three or four bytes, that end one, or have no meaning.
_PARTS = {
    "EUC_CN": ["a", "b0", "a1", "81", "ff"],
    "EUC_JP": ["a", "b4", "c1", "8e", "8f", "ff"],
    "EUC_JIS_2004": ["a", "b4", "c1", "a4f7", "8f", "ff"],
    "EUC_KR": ["a", "b0", "c9", "ff"],
    "EUC_TW": ["a", "a4", "8e", "a2", "ff"],
    "WIN1252": ["a", "81", "8d", "e9", "80"],
    "LATIN1": ["a", "81", "e9"],
    "KOI8R": ["a", "c1", "ff"],
}
_CONVERT_TEXTS = """
    create function pg_temp.to_utf8(stored bytea, name text) returns bytea language plpgsql as $$
    begin
        return convert(stored, name, 'UTF8');
    exception when character_not_in_repertoire or untranslatable_character then
        return '\\xff00'::bytea || stored;
    end $$;
    select pg_temp.to_utf8(t.stored, %s) from unnest(%s::bytea[]) with ordinality t(stored, number)
     order by number
"""


@pytest.fixture
def stored(server: EmbeddedServer, name: str) -> Iterator[StoredEncoding]:
    with converting(server, name) as found:
        yield found


def _combinations(name: str) -> list[bytes]:
    parts = [part.encode() if part == "a" else bytes.fromhex(part) for part in _PARTS[name]]
    return [
        b"".join(combination)
        for length in range(5)
        for combination in itertools.product(parts, repeat=length)
    ]


def _array(values: Sequence[bytes | None]) -> pa.LargeStringArray:
    binary = pa.array(values, pa.large_binary())
    return pa.LargeStringArray.from_buffers(len(values), *binary.buffers()[1:], binary.buffers()[0])


def _bytes(array: pa.LargeStringArray) -> list[bytes | None]:
    found: list[bytes | None] = array.view(pa.large_binary()).to_pylist()
    return found


@pytest.mark.parametrize("name", _PARTS)
def test_each_combination_of_bytes_is_converted_as_by_the_server(
    server: EmbeddedServer, stored: StoredEncoding, name: str
) -> None:
    values = _combinations(name)
    found = Database(server, "postgres").query(_CONVERT_TEXTS, (name, values))
    expected = [bytes(text) for (text,) in found]
    assert any(each.startswith(utf8.RAW) for each in expected) is (name not in ("LATIN1", "KOI8R"))

    assert stored.convert(values) == expected
    assert _bytes(stored.convert_array(_array(values))) == expected
    good = [value for value, each in zip(values, expected, strict=True) if each[:2] != utf8.RAW]
    assert _bytes(stored.convert_array(_array(good))) == [
        each for each in expected if each[:2] != utf8.RAW
    ]


@pytest.mark.parametrize("name", ["WIN1252", "EUC_JP"])
@pytest.mark.parametrize("last", ["e9", "81"])
def test_nulls_and_values_of_ascii_keep_their_places_in_an_array(
    stored: StoredEncoding, name: str, last: str
) -> None:
    """With a value that the server cannot convert, and without one."""
    high = {"WIN1252": b"\xe9", "EUC_JP": b"\xb4\xc1"}[name]
    text = {"WIN1252": "é", "EUC_JP": "漢"}[name].encode()
    values = [b"abc", None, high, b"", high + b"x", None, high, b"z", None]
    expected = [b"abc", None, text, b"", text + b"x", None, text, b"z", None]
    if last == "81":
        values.append(b"x\x81")
        expected.append(utf8.RAW + b"x\x81")
    converted = stored.convert_array(_array(values))
    converted.validate()
    assert _bytes(converted) == expected
    assert converted.null_count == 3


@pytest.mark.parametrize("name", ["WIN1252"])
def test_an_array_of_ascii_is_returned_as_it_is(stored: StoredEncoding) -> None:
    stored._convert = lambda characters: pytest.fail("the server was asked")
    for values in ([], [None], [b""], [b"abc", None, b"\x7f"]):
        array = _array(values)
        assert stored.convert_array(array) is array


@pytest.mark.parametrize("name", ["WIN1252", "EUC_JP"])
def test_the_server_is_asked_once_for_each_character(stored: StoredEncoding, name: str) -> None:
    asked: list[bytes] = []
    convert = stored._convert

    def ask(characters: Sequence[bytes]) -> Sequence[bytes | None]:
        asked.extend(characters)
        return convert(characters)

    stored._convert = ask
    good, bad = {"WIN1252": (b"\xe9", b"\x81"), "EUC_JP": (b"\xb4\xc1", b"\x81")}[name]
    for values in ([good, bad, b"a" + good], [good + good], [b"a", bad]):
        stored.convert(values)
    assert asked == sorted([good, bad])
    stored.convert_array(_array([good, b"a", bad]))
    # An array of an encoding with one byte per character needs the whole table.
    assert sorted(asked) == (
        sorted([good, bad]) if name == "EUC_JP" else [bytes((code,)) for code in range(0x80, 0x100)]
    )
    stored.convert_array(_array([good]))
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("name", "unknown"),
    [("WIN1252", b"\x81\x8d\x8f\x90\x9d"), ("LATIN1", b""), ("EUC_JP", b""), ("WIN1253", None)],
)
def test_bytes_without_a_character_are_known(stored: StoredEncoding, unknown: bytes | None) -> None:
    found = stored.unknown_bytes()
    if unknown is None:
        # Postgres's table of WIN1253 has more gaps than Python's.
        assert found == bytes(sorted(found))
        assert 0xAA in found
        return
    assert found == unknown


def test_utf8_and_ascii_need_no_conversion() -> None:
    needed = [name for name in ("UTF8", "SQL_ASCII", "LATIN1", "EUC_JP") if needs_conversion(name)]
    assert needed == ["LATIN1", "EUC_JP"]
