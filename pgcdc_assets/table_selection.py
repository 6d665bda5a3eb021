"""The choice of tables for a capture that follows its publication: patterns and common settings.

A pattern is written like a table's name, `schema.table`. In a bare part, `*` stands for any number
of characters and `?` for one character. In a part in double quotes every character is literal, as
in a name, so `"a.b".*` has the tables of schema `a.b`, and `public."a*"` is one table. Patterns
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
        """Return whether the pattern has a table."""
        schema, table = self.schema.fullmatch(name.schema), self.table.fullmatch(name.table)
        return schema is not None and table is not None


@dataclass(frozen=True)
class TableSelection:
    """Which tables of the publication a capture keeps, and how.

    Attributes:
        include: patterns; a table must match one of them.
        exclude: patterns of tables that are left out, also if `include` has them.
        scd: the SCD types of a table without settings of its own.
        soft_deletes: `CdcTable.soft_deletes` of such a table.
        without_key: `CdcTable.without_key` of such a table.
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
        """Return why a table is left out, as a predicate; None for a selected table."""
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
    # Atomic groups: a pattern with many stars does not backtrack.
    inner = "".join(f"(?>.*?{segment})" for segment in rest[:-1])
    return re.compile(f"{first}{inner}.*{rest[-1]}", re.DOTALL)


def _without_stars(text: str) -> str:
    return "".join("." if character == "?" else re.escape(character) for character in text)
