"""Reports of a running capture: lines of the run's log, and observations of the raw asset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dagster as dg

from pgcdc_assets.activity import notice
from pgcdc_assets.capture.progress import Notice, ProgressReport, Report
from pgcdc_assets.orchestration.metadata import phase_metadata


def progress_metadata(report: ProgressReport) -> dict[str, Any]:
    """Describe a running capture since its last report. Lag and slot are absent if unknown."""
    figures, decoded = report.figures, report.decoded
    metadata: dict[str, Any] = {
        "interval_seconds": round(figures.at, 1),
        "rows": float(figures.rows),
        "bytes_received": float(figures.byte_count),
        "rows_per_second": round(report.rows_per_second, 1),
        "windows_landed": float(figures.windows),
        **phase_metadata(figures.seconds),
        "queued_batches": float(report.queued_batches),
    }
    if report.lag_bytes is not None:
        metadata["lag_bytes"] = float(report.lag_bytes)
    if report.lag_seconds is not None:
        metadata["flush_lag_seconds"] = round(report.lag_seconds, 1)
    if decoded is not None:
        metadata["spilled_transactions"] = float(decoded.spill_txns)
        metadata["spilled_bytes"] = float(decoded.spill_bytes)
        metadata["streamed_transactions"] = float(decoded.stream_txns)
        metadata["streamed_bytes"] = float(decoded.stream_bytes)
        metadata["decoded_transactions"] = float(decoded.total_txns)
        metadata["decoded_bytes"] = float(decoded.total_bytes)
    return metadata


@dataclass(frozen=True)
class RunReports:
    """The reports of one run."""

    context: dg.AssetExecutionContext
    raw: dg.AssetKey

    def record(self, report: Report) -> None:
        """Log a report, and record an observation of its figures; a command shows a notice.

        A failure of Dagster's storage does not end the landing in progress.
        """
        try:
            log = self.context.log
            (log.warning if isinstance(report, Notice) else log.info)(str(report))
            if isinstance(report, Notice):
                notice(str(report))
            if isinstance(report, ProgressReport):
                metadata = progress_metadata(report)
                self.context.log_event(dg.AssetObservation(self.raw, metadata=metadata))
        except Exception as error:
            self.context.log.warning(f"A report of the capture was not recorded: {error}")
