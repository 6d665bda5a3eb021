"""The choice of tables for a capture that follows its publication: patterns and common settings.

A pattern has the form of a table's name, `schema.table`. In a part without quotes, `*` matches any
number of characters and `?` matches one character. In a part in double quotes, every character is
literal: `"a.b".*` matches the tables of schema `a.b`, and `public."a*"` matches one table. Patterns
distinguish upper and lower case, as the catalog does.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.table_name import QUOTED, TableName, parse_part

# The text of the setting `tables` that follows the publication.
ALL_TABLES = "all"

_PATTERN = re.compile(rf'(?P<schema>{QUOTED}|[^."]+)\.(?P<table>{QUOTED}|[^"]+)', re.DOTALL)
_WILDCARD = re.compile(r"[*?]")


@dataclass(frozen=True)
class TablePattern:
    """A pattern of table names.

    Attributes:
        text: the pattern as written.
        schema: regular expression of the schema.
        table: regular expression of the table.
    """

    text: str
    schema: re.Pattern[str]
    table: re.Pattern[str]

    @classmethod
    def parse(cls, text: str) -> TablePattern:
        """Return the pattern of a text.

        Raises:
            ConfigurationError: the text is not a pattern.
        """
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ConfigurationError(
                reason=f"{text!r} is not a pattern of table names: write schema.table, with * and "
                '? in parts without quotes, such as shop.*, *.tmp_* or "a.b".*'
            )
        return cls(text, _expression(match["schema"], text), _expression(match["table"], text))

    def matches(self, name: TableName) -> bool:
        """Return whether the pattern matches a table."""
        schema, table = self.schema.fullmatch(name.schema), self.table.fullmatch(name.table)
        return schema is not None and table is not None


@dataclass(frozen=True)
class TableSelection:
    """The tables of the publication that a capture keeps, and their common settings.

    Attributes:
        include: patterns; a table must match one of them.
        exclude: patterns of tables to omit, even if they match `include`.
        scd: `CdcTable.scd` of tables without their own settings.
        soft_deletes: `CdcTable.soft_deletes` of the same tables.
        without_key: `CdcTable.without_key` of the same tables.
    """

    include: tuple[str, ...] = ("*.*",)
    exclude: tuple[str, ...] = ()
    scd: tuple[int, ...] = (1,)
    soft_deletes: bool = False
    without_key: str = "bag"

    def __post_init__(self) -> None:
        if not self.include:
            raise ConfigurationError(
                reason="include must have at least one pattern, such as *.* or shop.*",
                setting="include",
            )
        for setting, texts in (("include", self.include), ("exclude", self.exclude)):
            for text in texts:
                try:
                    _parsed(text)
                except ConfigurationError as error:
                    raise ConfigurationError(reason=str(error), setting=setting) from None

    def find_reason(self, name: TableName) -> str | None:
        """Return the reason to omit a table, as a predicate; None for a selected table."""
        for text in self.exclude:
            if _parsed(text).matches(name):
                return f"matches the pattern {text} of exclude"
        if not any(_parsed(text).matches(name) for text in self.include):
            return "matches no pattern of include"
        return None

    def selects(self, name: TableName) -> bool:
        """Return whether the capture keeps a table of the publication."""
        return self.find_reason(name) is None


@functools.cache
def _parsed(text: str) -> TablePattern:
    return TablePattern.parse(text)


def _expression(part: str, whole: str) -> re.Pattern[str]:
    literal = parse_part(part, whole)
    if literal != part or not _WILDCARD.search(part):
        return re.compile(re.escape(literal))
    first, *rest = (_without_stars(segment) for segment in re.split(r"\*+", part))
    if not rest:
        return re.compile(first, re.DOTALL)
    # Use atomic groups, so that a pattern with many stars does not backtrack.
    inner = "".join(f"(?>.*?{segment})" for segment in rest[:-1])
    return re.compile(f"{first}{inner}.*{rest[-1]}", re.DOTALL)


def _without_stars(text: str) -> str:
    return "".join("." if character == "?" else re.escape(character) for character in text)
