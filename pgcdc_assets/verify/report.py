"""The result of a comparison."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.table_name import TableName


class DifferenceKind(enum.Enum):
    """The kind of a difference."""

    MISSING = "missing"
    EXTRA = "extra"
    DIFFERS = "differs"
    KEPT = "kept"


@dataclass(frozen=True)
class Difference:
    """A differing row.

    Attributes:
        key: texts of the key's columns. These are values of a row: show them only on the user's
            terminal.
        columns: the columns that differ; empty if only one side has the row.
    """

    kind: DifferenceKind
    key: tuple[str | None, ...]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The result of the comparison of one table.

    Attributes:
        missing: number of rows whose key only the source has.
        extra: number of rows whose key only the target has.
        differing: number of rows with the same key and different values.
        columns: the columns that differ, and the columns that only one side has.
        lsn: the LSN of the comparison; None for a comparison of the current rows.
        key_columns: the columns that identify rows.
        differences: some of the differing rows.
        is_counted: all differing rows were counted. Otherwise the counts are lower bounds.
        kept: number of rows of detached partitions that only the target has
            (`on_detached_partition: keep`), which are no difference.
        source_only: the columns that only the source has.
        target_only: the columns that only the target has.
        compared: the columns that both have.
    """

    schema: str
    table: str
    source_rows: int
    target_rows: int
    missing: int = 0
    extra: int = 0
    differing: int = 0
    columns: tuple[str, ...] = ()
    lsn: Lsn | None = None
    key_columns: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    is_counted: bool = True
    kept: int = 0
    source_only: tuple[str, ...] = ()
    target_only: tuple[str, ...] = ()
    compared: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def is_equal(self) -> bool:
        """Whether source and target have the same rows."""
        return not (self.missing or self.extra or self.differing or self.columns)

    def has_equal_values(self, columns: Iterable[str]) -> bool:
        """Return whether the columns that both sides have are equal, and include some columns.

        The target gets or loses a column with the next row after the change. If each side has a
        column of its own, the column may be a renamed one, which was not compared.
        """
        if self.missing or self.extra or self.differing:
            return False
        may_be_renamed = self.source_only and self.target_only
        return self.is_equal or not (may_be_renamed or set(columns).difference(self.compared))

    @property
    def qualified_name(self) -> str:
        """`schema.table`, for messages."""
        return str(TableName(self.schema, self.table))


@dataclass(frozen=True)
class ComparisonFailure:
    """A table that could not be compared."""

    schema: str
    table: str
    error: PgcdcError

    @property
    def qualified_name(self) -> str:
        """`schema.table`, for messages."""
        return str(TableName(self.schema, self.table))
