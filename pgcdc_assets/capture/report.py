"""The report of a captured window."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.window_summary import WindowSummary


@dataclass(frozen=True)
class CaptureReport:
    """The result of the capture of a window.

    Attributes:
        already_captured: an earlier run has landed the window; this run confirmed its end at most.
        counts: number of rows by `schema.table` and operation.
        first_commit_lsn: lowest commit LSN; None without rows, like the next three.
        bytes_received: bytes of the stream's messages that were decoded for the window.
        seconds: time from the call to the confirmation.
        warnings: counts of messages and values that were not landed as sent, by description.
    """

    window: LsnWindow
    already_captured: bool
    row_count: int
    counts: Mapping[str, Mapping[str, int]]
    transaction_count: int
    first_commit_lsn: Lsn | None
    last_commit_lsn: Lsn | None
    first_commit_ts: dt.datetime | None
    last_commit_ts: dt.datetime | None
    bytes_received: int = 0
    seconds: float = 0.0
    warnings: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        summary: WindowSummary,
        *,
        already_captured: bool,
        warnings: Mapping[str, int],
        bytes_received: int,
        seconds: float,
    ) -> CaptureReport:
        """Return the report of a window from its summary."""
        return cls(
            window=summary.window,
            already_captured=already_captured,
            row_count=summary.row_count,
            counts=summary.counts,
            transaction_count=summary.transaction_count,
            first_commit_lsn=summary.first_commit_lsn,
            last_commit_lsn=summary.last_commit_lsn,
            first_commit_ts=summary.first_commit_ts,
            last_commit_ts=summary.last_commit_ts,
            bytes_received=bytes_received,
            seconds=seconds,
            warnings=dict(warnings),
        )

    @property
    def rows_per_second(self) -> float:
        """Rows per second of the whole capture."""
        return self.row_count / self.seconds if self.seconds else 0.0
