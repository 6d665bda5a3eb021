"""Reports about a running capture: the source at the start, and figures at an interval.

A thread of its own reads the meter and, over a short connection, the server: a report appears also
while a landing hangs. The session hands the reports to its caller in the caller's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.capture.captured_slot import CapturedSlot
from pgcdc_assets.capture.meter import Meter, Phase, Reading
from pgcdc_assets.capture.source_stream import SourceStream
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.stream_statistics import (
    DecodingStatistics,
    SourceFacts,
    read_slot_progress,
    read_source_facts,
)

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

_PHASES = {
    Phase.WAITING: "waiting for the server",
    Phase.DECODING: "decoding",
    Phase.WRITING: "writing",
    Phase.COMMITTING: "committing",
    Phase.CONNECTING: "connecting",
    Phase.IDLE: "idle",
}
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class SourceReport:
    """The source at the start of a capture."""

    facts: SourceFacts

    def __str__(self) -> str:
        facts = self.facts
        kind = "standby" if facts.in_recovery else "server"
        retained = facts.retained_bytes
        parts = [
            f"Source: {kind} version {facts.server_version}",
            f"{facts.table_count} tables of about {_size(facts.table_bytes)}",
            *([] if retained is None else [f"{_size(retained)} of WAL retained for the slot"]),
            *(f"{name} {value or 'empty'}" for name, value in facts.settings.items()),
        ]
        old = [f" {each} {each.remedy}" for each in facts.prepared if each.is_forgotten]
        return f"{', '.join(parts)}.{''.join(old)}" if old else ", ".join(parts)


@dataclass(frozen=True)
class ProgressReport:
    """The figures of a capture since its last report.

    Attributes:
        figures: what was decoded and landed, and the seconds in each phase; `at` is the length of
            the interval in seconds.
        queued_batches: batches of messages that were received and not decoded yet.
        captured_through: the end of the last window whose messages were decoded.
        lag_bytes: WAL from there to the server's position; None if the server could not be asked.
        lag_seconds: the walsender's flush lag; None if the server does not know it.
        decoded: statistics of the slot; None if the server has none or could not be asked.
    """

    figures: Reading
    queued_batches: int
    captured_through: Lsn | None
    lag_bytes: int | None
    lag_seconds: float | None
    decoded: DecodingStatistics | None

    @property
    def rows_per_second(self) -> float:
        """Decoded rows per second of the interval."""
        return self.figures.rows / self.figures.at if self.figures.at else 0.0

    def __str__(self) -> str:
        figures, decoded = self.figures, self.decoded
        times = ", ".join(f"{text} {figures.seconds[each]:.1f} s" for each, text in _PHASES.items())
        lag = "unknown" if self.lag_bytes is None else _size(self.lag_bytes)
        if self.lag_seconds is not None:
            lag += f" and {self.lag_seconds:.1f} s"
        text = (
            f"In {figures.at:.0f} s: {figures.rows:,} rows, {_size(figures.byte_count)}, "
            f"{self.rows_per_second:,.0f} rows/s, {figures.windows} windows landed; {times}; "
            f"{self.queued_batches} batches queued; lag {lag}"
        )
        if decoded is None:
            return text
        return (
            f"{text}; the server decoded {decoded.total_txns:,} transactions "
            f"({_size(decoded.total_bytes)}), spilled {decoded.spill_txns:,} "
            f"({_size(decoded.spill_bytes)}) and streamed {decoded.stream_txns:,} "
            f"({_size(decoded.stream_bytes)})"
        )


@dataclass(frozen=True)
class Notice:
    """A problem that does not end the capture."""

    text: str

    def __str__(self) -> str:
        return self.text


Report = SourceReport | ProgressReport | Notice


class Diagnostics:
    """The meter of a session, and the thread that makes its reports.

    Args:
        captured: the slot, and the interval of the reports.
        on_report: function that receives the reports in the session's thread; None: no reports.
        source: function that returns the stream in progress.
    """

    def __init__(
        self,
        captured: CapturedSlot,
        on_report: Callable[[Report], None] | None,
        source: Callable[[], SourceStream | None],
    ) -> None:
        self.meter = Meter()
        self._captured = captured
        self._on_report = on_report
        self._source = source
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"report {captured.slot}", daemon=True
        )

    def begin(self, conn: Connection) -> None:
        """Describe the source over the connection of the lease, and start the thread, once."""
        if self._on_report is None or self._thread.ident is not None:
            return
        facts = read_source_facts(conn, self._captured.slot, self._captured.publication)
        if facts is not None:
            self._reports.put(SourceReport(facts))
        self._thread.start()

    def notify(self, text: str) -> None:
        """Report a problem that does not end the capture."""
        self._reports.put(Notice(text))

    def end(self) -> None:
        """End the thread. The call does not wait for a query in progress."""
        self._ended.set()

    def deliver(self) -> None:
        """Hand the reports that wait to `on_report`.

        Reports that are made during the call wait for the next call. A slow `on_report` therefore
        delays the capture, and does not stop it.
        """
        if self._on_report is not None:
            for _ in range(self._reports.qsize()):
                self._on_report(self._reports.get())

    def _run(self) -> None:
        last = self.meter.read()
        while not self._ended.wait(self._captured.limits.report_seconds):
            if not self._reports.empty():
                # The next report has the figures of this interval too.
                continue
            now = self.meter.read()
            self._reports.put(self._report(now.since(last)))
            last = now

    def _report(self, figures: Reading) -> ProgressReport:
        source = self._source()
        queued, through = 0, None
        if source is not None:
            queued, through = source.stream.queued_batches, source.position
        asked = read_slot_progress(self._captured.settings, self._captured.slot)
        if asked is None:
            return ProgressReport(figures, queued, through, None, None, None)
        status, decoded = asked
        lag_bytes = None if through is None else max(0, int(status.current_lsn) - int(through))
        return ProgressReport(figures, queued, through, lag_bytes, status.lag_seconds, decoded)


def _size(byte_count: int) -> str:
    return f"{byte_count / _MEGABYTE:,.1f} MB"
