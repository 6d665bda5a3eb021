"""The result of a comparison."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.table_name import TableName


class DifferenceKind(enum.Enum):
    """How a row differs."""

    MISSING = "missing"
    EXTRA = "extra"
    DIFFERS = "differs"


@dataclass(frozen=True)
class Difference:
    """One row that differs.

    Attributes:
        key: texts of its key's columns: values of a row, for the user's terminal alone.
        columns: where the two rows differ; empty where one side has none.
    """

    kind: DifferenceKind
    key: tuple[str | None, ...]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What comparing one table found.

    Attributes:
        missing: rows of the source whose key the target has not.
        extra: rows of the target whose key the source has not.
        differing: rows with the same key and other values.
        columns: where the differing rows differ, and columns that one side lacks.
        lsn: both sides were read at this LSN; None when they were read as they were.
        key_columns: the columns that identify rows.
        differences: some of the rows that differ.
        is_counted: all differing rows were counted; else there are so many that the three counts
            are lower bounds.
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

    @property
    def is_equal(self) -> bool:
        """Whether both sides hold the same rows."""
        return not (self.missing or self.extra or self.differing or self.columns)

    @property
    def qualified_name(self) -> str:
        """`schema.table`, for messages."""
        return str(TableName(self.schema, self.table))


@dataclass(frozen=True)
class ComparisonFailure:
    """A table that could not be compared; the others were not held up."""

    schema: str
    table: str
    error: PgcdcError

    @property
    def qualified_name(self) -> str:
        """`schema.table`, for messages."""
        return str(TableName(self.schema, self.table))
