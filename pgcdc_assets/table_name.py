"""A table's name: read from text, printed, and encoded where a character set is limited.

Postgres allows every character but NUL in a name, also dots, quotes, slashes and blanks. So a name
is written in four ways, and no two tables have one text in any of them:

    text         `public.orders`, `public."Order Lines"`, `"a.b".c`: settings, commands, messages
    encoded      `orders`, `Order~20~Lines`: folders of the lake, parts of asset keys
    partition    `public.orders`, `public.Order~20~Lines`: partition keys of the snapshot asset
    identifier   `shop__scd1__public__OrderX20XLines`: names of outputs inside of Dagster's steps
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from pgcdc_assets.errors import ConfigurationError

DEFAULT_SCHEMA = "public"

_QUOTED = r'(?:U&)?"(?:[^"]|"")+"'
_TEXT = re.compile(rf'(?:(?P<schema>{_QUOTED}|[^."]+)\.)?(?P<table>{_QUOTED}|[^"]+)', re.DOTALL)
_BARE_SCHEMA = re.compile(r"[\w$-]+")
_BARE_TABLE = re.compile(r"[\w$-][\w$.-]*")
# Control characters, and what an editor shows as a line's end or not at all.
_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\xa0\xad\u2000-\u200f\u2028-\u202f\u2060-\u206f\ufeff]")
_UNICODE_ESCAPE = re.compile(r"\\(?:(\\)|([0-9A-Fa-f]{4})|\+([0-9A-Fa-f]{6}))")
_NOT_ENCODED = re.compile(r"[A-Za-z0-9_$.-]")
_NOT_IN_IDENTIFIER = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[^A-WYZa-z0-9_]")


class TableName(NamedTuple):
    """Schema and name of a table, in the letters that Postgres has."""

    schema: str
    table: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read `table` or `schema.table`, each part bare or in quotes; the default is `public`.

        A bare schema ends at the first dot; a bare table has all that follows. In quotes every
        character stands for itself, and a quote is doubled; `U&"..."` has Unicode escapes, as in
        Postgres.

        Raises:
            ConfigurationError: the text is not such a name.
        """
        match = _TEXT.fullmatch(text)
        if match is None or (match["schema"] is None and "." in match["table"].split('"')[0]):
            raise _malformed(text)
        return cls(_part(match["schema"] or DEFAULT_SCHEMA, text), _part(match["table"], text))

    def __str__(self) -> str:
        """Write the text that `parse` reads, in quotes where they are needed."""
        schema = self.schema if _BARE_SCHEMA.fullmatch(self.schema) else quoted(self.schema)
        table = self.table if _BARE_TABLE.fullmatch(self.table) else quoted(self.table)
        return f"{schema}.{table}"

    @property
    def partition_key(self) -> str:
        """The table's partition of the snapshot asset.

        Dagster reads three dots as a range of partitions.
        """
        schema, table = encode_name(self.schema).replace(".", "~2e~"), encode_name(self.table)
        if "..." in f"{schema}.{table}":
            table = table.replace(".", "~2e~")
        return f"{schema}.{table}"

    @property
    def record_name(self) -> str:
        """The table in the records of the raw zone: `schema.table`, as every lake has it.

        A schema with a dot or a quote is written in quotes.
        """
        if "." in self.schema or '"' in self.schema:
            return f"{quoted(self.schema)}.{self.table}"
        return f"{self.schema}.{self.table}"


def quoted(*names: str) -> str:
    """Write names as SQL identifiers joined by dots; invisible characters as Unicode escapes."""
    return ".".join(map(_quoted, names))


def encode_name(name: str) -> str:
    """Write a name in letters, digits and `_ $ - .`; other characters are `~`, code point, `~`.

    Slashes would nest folders; engines disagree about percent signs, blanks and glob characters.
    """
    return "".join(c if _NOT_ENCODED.match(c) else f"~{ord(c):x}~" for c in name)


def folder_name(name: str) -> str:
    """Encode a name for a folder, with a leading dot too: that would hide the folder."""
    text = encode_name(name)
    return f"~2e~{text[1:]}" if text.startswith(".") else text


def identifier(parts: Sequence[str], reserved_endings: Sequence[str] = ()) -> str:
    """Join names with `__` to letters, digits and underscores; other characters are `X` code `X`.

    Args:
        reserved_endings: words that are put behind identifiers, with an underscore between.
    """
    words = [_NOT_IN_IDENTIFIER.sub(lambda c: f"X{ord(c[0]):x}X", part) for part in parts]
    for ending in reserved_endings:
        if words[-1].endswith(f"_{ending}"):
            words[-1] = f"{words[-1].removesuffix(f'_{ending}')}X5fX{ending}"
    return "__".join(words)


def _part(text: str, whole: str) -> str:
    if text.startswith("U&"):
        return _unescaped(text[3:-1].replace('""', '"'), whole)
    if text.startswith('"'):
        return text[1:-1].replace('""', '"')
    if text != text.strip():
        raise _malformed(whole)
    return text


def _unescaped(text: str, whole: str) -> str:
    if "\\" in _UNICODE_ESCAPE.sub("", text):
        raise _malformed(whole)
    return _UNICODE_ESCAPE.sub(lambda m: m[1] or chr(int(m[2] or m[3], 16)), text)


def _quoted(name: str) -> str:
    if not _INVISIBLE.search(name):
        return '"' + name.replace('"', '""') + '"'
    text = name.replace("\\", "\\\\").replace('"', '""')
    return 'U&"' + _INVISIBLE.sub(lambda c: f"\\{ord(c[0]):04X}", text) + '"'


def _malformed(text: str) -> ConfigurationError:
    return ConfigurationError(
        reason=f"{text!r} does not name a table: write schema.table, with a part in double quotes "
        'that has dots or quotes of its own, such as public."Order Lines" or "a.b".c'
    )
