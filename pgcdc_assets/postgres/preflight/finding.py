"""The result of a pre-flight check: one sentence, and the SQL that corrects the problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pgcdc_assets.errors import ConfigurationError

Severity = Literal["error", "warning", "ok"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the pre-flight.

    Attributes:
        code: constant that names the check, such as `wal_level`, `publication` or `slot`.
        severity: error: a capture fails or loses changes; warning: a problem is likely later.
        message: sentence that names the object.
        remedy: SQL statement or instruction; empty if no action is necessary.
        table: `schema.table` for a finding about one table; else None.
    """

    code: str
    severity: Severity
    message: str
    remedy: str = ""
    table: str | None = None

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".rstrip()


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise an exception if the findings contain errors.

    Raises:
        ConfigurationError: the sentences of all errors.
    """
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if errors:
        raise ConfigurationError(reason=" ".join(errors))
