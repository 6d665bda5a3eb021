"""The report of a captured window, and what is known before the report."""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pgcdc_assets.capture.meter import Phase
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.windows.summary import WindowSummary


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
        phase_seconds: seconds in each phase of the capture, see `meter.Phase`.
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
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict, compare=False)

    @property
    def rows_per_second(self) -> float:
        """Rows per second of the whole capture."""
        return self.row_count / self.seconds if self.seconds else 0.0


@dataclass
class Attempt:
    """The capture of a window in progress, over all connections.

    Attributes:
        began: start of the capture by the monotonic clock.
        summary: the landed rows; None before the landing.
        is_landed_here: this attempt landed the window.
    """

    window: LsnWindow
    began: float = field(default_factory=time.monotonic)
    summary: WindowSummary | None = None
    is_landed_here: bool = False
    warnings: Counter[str] = field(default_factory=Counter)
    bytes_received: int = 0

    def report(self) -> CaptureReport:
        """Return the report of the landed window."""
        assert self.summary is not None
        return CaptureReport(
            window=self.summary.window,
            already_captured=not self.is_landed_here,
            row_count=self.summary.row_count,
            counts=self.summary.counts,
            transaction_count=self.summary.transaction_count,
            first_commit_lsn=self.summary.first_commit_lsn,
            last_commit_lsn=self.summary.last_commit_lsn,
            first_commit_ts=self.summary.first_commit_ts,
            last_commit_ts=self.summary.last_commit_ts,
            bytes_received=self.bytes_received,
            seconds=time.monotonic() - self.began,
            warnings=dict(self.warnings),
        )
