"""What a pre-flight check says: one sentence, and the SQL that mends it."""

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
        code: a fixed word for what was looked at: `wal_level`, `publication`, `replica_identity`
            ...
        severity: an error stops a capture or falsifies it; a warning will bite later.
        message: names the thing.
        remedy: what to do, SQL where SQL does it; empty when nothing is to be done.
        table: `schema.table` where the finding is about one.
    """

    code: str
    severity: Severity
    message: str
    remedy: str = ""
    table: str | None = None

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".rstrip()


def raise_errors(findings: Iterable[Finding]) -> None:
    """Turn findings into an exception when there are errors among them.

    Raises:
        ConfigurationError: with all errors' sentences.
    """
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if errors:
        raise ConfigurationError(reason=" ".join(errors))
