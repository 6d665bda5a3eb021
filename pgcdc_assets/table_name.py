"""A table's name: parsed from text, printed, and encoded for limited character sets.

Postgres allows every character except NUL in a name, also dots, quotes, slashes and blanks. A name
therefore has four forms. In each form, two different tables have two different texts:

    text         `public.orders`, `public."Order Lines"`, `"a.b".c`: settings, commands, messages
    encoded      `orders`, `Order~20~Lines`: folders of the lake, parts of asset keys
    partition    `public.orders`, `public.Order~20~Lines`: partition keys of the snapshot asset
    identifier   `shop__scd1__public__OrderX20XLines`: names of outputs in Dagster's steps
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from pgcdc_assets.errors import ConfigurationError

DEFAULT_SCHEMA = "public"

QUOTED = r'(?:U&)?"(?:[^"]|"")+"'
_TEXT = re.compile(rf'(?:(?P<schema>{QUOTED}|[^."]+)\.)?(?P<table>{QUOTED}|[^"]+)', re.DOTALL)
_BARE_SCHEMA = re.compile(r"[\w$-]+")
_BARE_TABLE = re.compile(r"[\w$-][\w$.-]*")
# Control characters, and characters that editors show as a line break or not at all.
_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\xa0\xad\u2000-\u200f\u2028-\u202f\u2060-\u206f\ufeff]")
_UNICODE_ESCAPE = re.compile(r"\\(?:(\\)|([0-9A-Fa-f]{4})|\+([0-9A-Fa-f]{6}))")
_NOT_ENCODED = re.compile(r"[A-Za-z0-9_$.-]")
# Delta takes a folder beside such a folder for a part of a Delta table, and Spark ignores the files
# below it (DeltaTableUtils.findDeltaTableRoot(), FileStreamSink.ancestorIsMetadataDirectory()).
_FOLDERS_OF_SPARK = frozenset({"_delta_log", "_spark_metadata"})
_NOT_IN_IDENTIFIER = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[^A-WYZa-z0-9_]")


class TableName(NamedTuple):
    """Schema and name of a table as in the catalog, without case folding."""

    schema: str
    table: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Return the name of a text `table` or `schema.table`. The default schema is `public`.

        Each part is bare or in double quotes. A bare schema ends at the first dot; a bare table is
        the whole remainder. In quotes every character is literal, and a quote is doubled. A part
        `U&"..."` has Unicode escapes (4.1.1 Identifiers and Key Words).

        Raises:
            ConfigurationError: the text is not a table's name.
        """
        match = _TEXT.fullmatch(text)
        if match is None or (match["schema"] is None and "." in match["table"].split('"')[0]):
            raise _malformed(text)
        return cls(
            parse_part(match["schema"] or DEFAULT_SCHEMA, text), parse_part(match["table"], text)
        )

    def __str__(self) -> str:
        """Return the text that `parse` reads, with quotes if necessary."""
        schema = self.schema if _BARE_SCHEMA.fullmatch(self.schema) else quoted(self.schema)
        table = self.table if _BARE_TABLE.fullmatch(self.table) else quoted(self.table)
        return f"{schema}.{table}"

    @property
    def partition_key(self) -> str:
        """The table's partition key of the snapshot asset.

        The key contains no three dots, which Dagster parses as a range of partitions.
        """
        schema, table = encode_name(self.schema).replace(".", "~2e~"), encode_name(self.table)
        if "..." in f"{schema}.{table}":
            table = table.replace(".", "~2e~")
        return f"{schema}.{table}"

    @property
    def record_name(self) -> str:
        """The name in the records of the raw zone: `schema.table`, in all releases.

        A schema with a dot or a quote is in double quotes.
        """
        if "." in self.schema or '"' in self.schema:
            return f"{quoted(self.schema)}.{self.table}"
        return f"{self.schema}.{self.table}"


def quoted(*names: str) -> str:
    """Return SQL identifiers joined by dots, with invisible characters as Unicode escapes."""
    return ".".join(map(_quoted, names))


def encode_name(name: str) -> str:
    """Return a name in letters, digits and `_ $ - .`, with other characters as `~code point~`.

    Slashes would nest folders, and engines differ in percent signs, blanks and glob characters.
    """
    return "".join(c if _NOT_ENCODED.match(c) else f"~{ord(c):x}~" for c in name)


def folder_name(name: str) -> str:
    """Return a name encoded for a folder.

    A leading dot, which hides a folder, is encoded too, and so is the underscore of names that
    folders of Delta and Spark have.
    """
    text = encode_name(name)
    # A file system may ignore case.
    if text.startswith(".") or text.lower() in _FOLDERS_OF_SPARK:
        return f"~{ord(text[0]):x}~{text[1:]}"
    return text


def output_name(parts: Sequence[str], reserved_endings: Sequence[str] = ()) -> str:
    """Return names joined by `__`, in letters, digits and underscores.

    Other characters become `X`, hexadecimal code point, `X`.

    Args:
        parts: the names.
        reserved_endings: words that callers append with an underscore; a name with such an ending
            is encoded.
    """
    words = [_NOT_IN_IDENTIFIER.sub(lambda c: f"X{ord(c[0]):x}X", part) for part in parts]
    for ending in reserved_endings:
        if words[-1].endswith(f"_{ending}"):
            words[-1] = f"{words[-1].removesuffix(f'_{ending}')}X5fX{ending}"
    return "__".join(words)


def parse_part(text: str, whole: str) -> str:
    """Return the name of one part, bare or in double quotes, of a text.

    Raises:
        ConfigurationError: the part is malformed.
    """
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
        reason=f"{text!r} does not name a table: write schema.table, and quote a part with dots, "
        'blanks or quotes, such as public."Order Lines" or "a.b".c'
    )
