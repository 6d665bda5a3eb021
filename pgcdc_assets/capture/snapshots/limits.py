"""The limits of the age of a snapshot that the connections of a copy share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgcdc_assets.postgres.snapshots.age import SnapshotAge

if TYPE_CHECKING:
    from pgcdc_assets.errors import PgcdcError
    from pgcdc_assets.settings.policies import SnapshotPolicy

# Share of the age at which the server warns. The rest is time for the ranges that are running.
_WARNING_SHARE = 0.5


@dataclass
class SnapshotLimits:
    """The measured age of a held snapshot, and its limits.

    Attributes:
        max_seconds: `snapshot.max_seconds`.
        max_transactions: `snapshot.max_xmin_age`, or half the age at which the server warns.
        setting: the setting that `max_transactions` comes from.
        xmin: 64-bit xmin of the snapshot.
        transactions: the age at the last measurement.
        ended_by: why the snapshot has ended before a limit, for a sentence; None: it has not.
        error: the error that showed this.
    """

    max_seconds: float | None
    max_transactions: int
    setting: str
    xmin: int
    transactions: int = 0
    began: float = field(default_factory=time.monotonic)
    ended_by: str | None = None
    error: PgcdcError | None = None

    @classmethod
    def of(cls, policy: SnapshotPolicy, xmin: int, warning_age: int) -> SnapshotLimits:
        """Return the limits of a snapshot.

        Args:
            xmin: 64-bit xmin of the snapshot.
            warning_age: the age at which the server warns.
        """
        if policy.max_xmin_age is not None:
            return cls(policy.max_seconds, policy.max_xmin_age, "snapshot.max_xmin_age", xmin)
        limit = int(warning_age * _WARNING_SHARE)
        return cls(policy.max_seconds, limit, "half of autovacuum_freeze_max_age", xmin)

    @property
    def age(self) -> SnapshotAge:
        """The age now; the transactions are those of the last measurement."""
        return SnapshotAge(self.transactions, time.monotonic() - self.began)

    @property
    def exceeded(self) -> str | None:
        """The limit that is exceeded, for a sentence; None if none is."""
        if self.ended_by is not None:
            return self.ended_by
        age = self.age
        if self.max_seconds is not None and age.seconds >= self.max_seconds:
            return f"snapshot.max_seconds ({self.max_seconds:g})"
        if age.transactions >= self.max_transactions:
            return f"{self.setting} ({self.max_transactions} transactions)"
        return None
