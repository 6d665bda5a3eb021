"""The result of a comparison."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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

    @property
    def is_equal(self) -> bool:
        """Whether source and target have the same rows."""
        return not (self.missing or self.extra or self.differing or self.columns)

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
