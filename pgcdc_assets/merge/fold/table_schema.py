"""The schema of an SCD table: columns, types, key, and the place of each column in older tuples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pgcdc_assets.protocol.relation import Relation
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


@dataclass(frozen=True)
class DeltaType:
    """How one Postgres type is kept.

    Attributes:
        ddl: the Spark SQL type.
        expression: gives the SQL of the typed value for the SQL of the text.
        may_rescue: some texts that Postgres prints have no value of this type.
        is_fixed_length: Postgres never stores it out of line, so it is never unchanged TOAST.
    """

    ddl: str
    expression: Callable[[str], str]
    may_rescue: bool = False
    is_fixed_length: bool = False

    @property
    def is_text(self) -> bool:
        """Say whether the typed value is the text itself."""
        return self.expression is as_text


def as_text(text: str) -> str:
    return text


@dataclass(frozen=True)
class Field:
    """A source column in the SCD table.

    Attributes:
        default: the text that rows from before the column have; None: NULL.
    """

    name: str
    type: DeltaType
    comment: str
    default: str | None = None


@dataclass(frozen=True)
class Layout:
    """Where the fields stand in the tuples of one relation version; None: not there yet."""

    version: int
    positions: tuple[int | None, ...]
    has_full_identity: bool


@dataclass(frozen=True)
class TableSchema:
    """The columns of one SCD table.

    Attributes:
        key: indexes of the key's fields; none for a table whose rows nothing tells apart.
        layouts: of every relation version that tuples may have.
        system: name, type and meaning of the columns that are ours.
        nullable_key: those of the key's fields of which nothing says that they are never NULL: the
            settings name them, and the replica identity is the whole row.
    """

    relation: Relation
    version: int
    fields: tuple[Field, ...]
    key: tuple[int, ...]
    layouts: tuple[Layout, ...]
    system: SystemColumns = SCD1_COLUMNS
    nullable_key: tuple[int, ...] = ()

    @property
    def may_rescue(self) -> bool:
        """Whether some column may not hold every text."""
        return any(field.type.may_rescue for field in self.fields)

    @property
    def stored_position(self) -> tuple[str, str, str]:
        """SQL of the LSN, commit time and operation that a row of the table has from its change."""
        if self.system is SCD2_COLUMNS:
            return VALID_FROM_LSN, VALID_FROM, OP
        return LSN, COMMIT_TS, "CAST(NULL AS STRING)"

    @property
    def key_names(self) -> tuple[str, ...]:
        """Names of the key's columns."""
        return tuple(self.fields[i].name for i in self.key)
