"""The schema of an SCD table: columns, types, key, and each column's place in older tuples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.spark.sql import string
from pgcdc_assets.tables.columns import (
    COMMIT_TS,
    LSN,
    OP,
    SCD1_COLUMNS,
    SCD2_COLUMNS,
    VALID_FROM,
    VALID_FROM_LSN,
    SystemColumns,
)
from pgcdc_assets.tables.comments import TABLE


@dataclass(frozen=True)
class DeltaType:
    """The Delta type of a Postgres type.

    Attributes:
        ddl: the Spark SQL type.
        expression: returns the SQL of the typed value for the SQL of the text.
        may_rescue: the type cannot hold some texts that Postgres prints.
        is_fixed_length: Postgres never stores the type out of line, so it is never unchanged TOAST.
    """

    ddl: str
    expression: Callable[[str], str]
    may_rescue: bool = False
    is_fixed_length: bool = False

    @property
    def is_text(self) -> bool:
        """Whether the typed value is the text itself."""
        return self.expression is as_text


def as_text(text: str) -> str:
    return text


TEXT = DeltaType("STRING", as_text)


@dataclass(frozen=True)
class Field:
    """A source column in the SCD table.

    Attributes:
        default: the text of the column in rows that are older than the column; None: NULL.
        chosen: the Delta type that the settings choose; None: the default type.
        convert_default: returns the SQL of that text in the column's present type; None: the same.
        source: the column of the source, see `tables/source_columns.py`; None if unknown.
        is_retained: the source dropped the column, and the table keeps its past.
        is_commented: `comment` is the source's, and not the Postgres type.
    """

    name: str
    type: DeltaType
    comment: str
    default: str | None = None
    chosen: str | None = None
    convert_default: Callable[[str], str] | None = field(default=None, compare=False)
    source: str | None = None
    is_retained: bool = False
    is_commented: bool = False

    @property
    def default_sql(self) -> str | None:
        """The SQL of the text of the column in older rows; None: NULL."""
        if self.default is None:
            return None
        text = string(self.default)
        return text if self.convert_default is None else self.convert_default(text)


@dataclass(frozen=True)
class Layout:
    """The positions of the fields in tuples of one relation version; None: missing there.

    Attributes:
        identity: indexes of the fields of the replica identity; empty for FULL and NOTHING.
        conversions: by field index, the functions that return the SQL of the text of the newest
            type for the SQL of this version's text; without an entry the texts are the same.
    """

    version: int
    positions: tuple[int | None, ...]
    identity: frozenset[int]
    conversions: Mapping[int, Callable[[str], str]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class TableSchema:
    """The columns of one SCD table.

    Attributes:
        key: indexes of the key's fields; empty for a table without a key.
        layouts: of every relation version of the tuples.
        system: the system columns.
        epoch: of the relation version.
        nullable_key: fields of the key that may be NULL: the settings name them, and the replica
            identity is FULL.
        description: the comment of the source's table; empty without a comment.
    """

    relation: Relation
    version: int
    fields: tuple[Field, ...]
    key: tuple[int, ...]
    layouts: tuple[Layout, ...]
    system: SystemColumns = SCD1_COLUMNS
    nullable_key: tuple[int, ...] = ()
    epoch: int = 1
    description: str = ""

    def with_comments(self, comments: Mapping[int, str]) -> TableSchema:
        """Return the schema with the comments of the source.

        Args:
            comments: by attnum; 0 is the table.
        """
        by_source = {f"{self.source_prefix}{number}": text for number, text in comments.items()}
        fields = (
            replace(each, comment=by_source[each.source], is_commented=True)
            if each.source in by_source
            else each
            for each in self.fields
        )
        return replace(self, fields=tuple(fields), description=comments.get(TABLE, ""))

    @property
    def source_prefix(self) -> str:
        """How the identities of the source's columns begin, see `tables/source_columns.py`."""
        return f"{self.epoch}/{self.relation.relation_id}."

    @property
    def may_rescue(self) -> bool:
        """Whether a column cannot hold every text."""
        return any(each.type.may_rescue for each in self.fields)

    @property
    def retained(self) -> tuple[int, ...]:
        """Indexes of the fields that the source has dropped."""
        return tuple(i for i, each in enumerate(self.fields) if each.is_retained)

    @property
    def stored_position(self) -> tuple[str, str, str]:
        """SQL of the LSN, the commit time and the operation of a row's change."""
        if self.system is SCD2_COLUMNS:
            return VALID_FROM_LSN, VALID_FROM, OP
        return LSN, COMMIT_TS, "CAST(NULL AS STRING)"

    def copied_text(self, index: int) -> str:
        """Write the SQL of a field's text in a tuple of a snapshot, column `new`."""
        return "CAST(NULL AS STRING)" if self.fields[index].is_retained else f"new[{index}]"

    @property
    def chosen_types(self) -> dict[str, str]:
        """The types that the settings choose, by column."""
        return {field.name: field.chosen for field in self.fields if field.chosen is not None}

    @property
    def key_names(self) -> tuple[str, ...]:
        """Names of the key's columns."""
        return tuple(self.fields[i].name for i in self.key)
