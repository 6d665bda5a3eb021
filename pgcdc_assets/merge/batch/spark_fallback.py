"""Why Spark merges a table that this process does not merge."""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.merge.task import MergeTask

NO_VALUE = "a change lacks a value that neither earlier changes nor the table have"
TOO_MANY_VALUES = "the values that its changes lack are too large together"


class NotInScope(Exception):
    """Spark has to merge the table. Nothing was written.

    Attributes:
        reason: for users: a clause with the names of columns and settings, but no value of a row.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CommitConflict(NotInScope):
    """Another writer has committed to the table. Nothing of this step is visible."""

    def __init__(self) -> None:
        super().__init__("another writer has committed to the table")


@dataclass(frozen=True)
class LeftMerge:
    """A merge that Spark has to do.

    Attributes:
        reason: as of `NotInScope`.
    """

    task: MergeTask
    reason: str


def reason_of(error: Exception) -> str:
    """Return the reason why Spark merges a table after an error, without the error's text."""
    if isinstance(error, NotInScope):
        return error.reason
    return f"the merge without Spark ended with {type(error).__name__}"
