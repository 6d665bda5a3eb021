"""The conversion of texts to UTF-8 by the server, and texts that it cannot convert."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from psycopg2 import Binary
from psycopg2.errors import CharacterNotInRepertoire, UntranslatableCharacter

from pgcdc_assets.errors import TransientError
from pgcdc_assets.protocol.encodings import StoredEncoding, needs_conversion

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# SQLSTATE of a character that is not valid in its encoding, and of one without a form in another.
UNCONVERTIBLE = frozenset({"22021", "22P05"})

# The driver's classes of these SQLSTATEs, which have no base class of their own.
CONVERSION_ERRORS = (CharacterNotInRepertoire, UntranslatableCharacter)

_Found = TypeVar("_Found")

_CONVERT = """
select pg_catalog.convert(t.stored, %s, 'UTF8')
  from unnest(%s::bytea[]) with ordinality t(stored, number) order by t.number
"""


class TextNotConvertible(TransientError):
    """The server ended a stream at a text that it cannot convert to UTF-8."""

    message = (
        "Slot {slot} has a text that the server cannot convert to UTF-8. "
        "Run it again: the texts are then received as stored, and converted after that."
    )

    slot: str


def stored_encoding(conn: Connection) -> StoredEncoding | None:
    """Return the encoding of a connection's database; None if the server converts no text.

    Args:
        conn: in autocommit mode. The encoding uses the connection as long as it meets new
            characters.
    """
    name = conn.get_parameter_status("server_encoding")
    if name is None or not needs_conversion(name):
        return None

    def convert(characters: Sequence[bytes]) -> list[bytes | None]:
        return _convert(conn, name, characters)

    return StoredEncoding(name, convert)


def _convert(conn: Connection, name: str, characters: Sequence[bytes]) -> list[bytes | None]:
    """Convert characters by one statement, or by halves if one of them cannot be converted."""
    try:
        with conn.cursor() as cursor:
            cursor.execute(_CONVERT, (name, list(map(Binary, characters))))
            return [bytes(row[0]) for row in cursor.fetchall()]
    except CONVERSION_ERRORS:
        if len(characters) == 1:
            return [None]
    middle = len(characters) // 2
    return _convert(conn, name, characters[:middle]) + _convert(conn, name, characters[middle:])


def read_legible(
    read: Callable[[Sequence[int]], Mapping[int, _Found]], oids: Sequence[int]
) -> tuple[dict[int, _Found], list[int]]:
    """Read the catalog's facts of relations, without those of relations that have illegible texts.

    A database of encoding SQL_ASCII accepts any bytes in a name, a comment or a label. In other
    encodings, such as WIN1252, a character may have no form in UTF-8. One text fails the whole
    query, so the relations are then read by halves.

    Args:
        read: reads the facts of the relations by OID, over a connection in autocommit mode.
        oids: the OIDs of the relations.

    Returns:
        The facts by OID, and the OIDs of the relations with a text that the server cannot convert.
    """
    try:
        return dict(read(oids)), []
    except CONVERSION_ERRORS:
        if len(oids) == 1:
            return {}, list(oids)
    middle = len(oids) // 2
    first, first_left_out = read_legible(read, oids[:middle])
    second, second_left_out = read_legible(read, oids[middle:])
    return first | second, first_left_out + second_left_out
