"""The result of a check of an SCD table's invariants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pgcdc_assets.lsn import Lsn


class Rule(StrEnum):
    """A rule, whose count of violations must be 0."""

    DUPLICATE_KEYS = "duplicate_keys"
    SEVERAL_CURRENT = "keys_with_several_current_rows"
    OVERLAPPING = "overlapping_versions"
    REVERSED = "reversed_versions"
    WRONG_FLAG = "wrong_current_flags"
    UNEXPLAINED_ENDS = "unexplained_ends"
    NOT_IN_SCD1 = "current_rows_not_in_scd1"
    ROW_COUNTS = "row_count_difference"
    MISSING_DEFAULTS = "rows_without_an_added_default"


@dataclass(frozen=True)
class Findings:
    """Counts of violations, without a value of a row.

    Attributes:
        has_key: the table has a merge key. Without a key only the rule about added columns applies.
        since: rows at this LSN or above were checked; None: all rows.
        row_count: number of rows that were checked.
        violations: counts by rule.
        not_judged: the rules that could not be checked, with the reasons.
    """

    schema: str
    table: str
    scd: int
    has_key: bool = True
    since: Lsn | None = None
    row_count: int = 0
    violations: Mapping[Rule, int] = field(default_factory=dict)
    not_judged: Mapping[Rule, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether no violation was found."""
        return not any(self.violations.values())
