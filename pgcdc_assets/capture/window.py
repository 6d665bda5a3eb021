"""Capture of one window: a session of one window.

`session` explains the order of the steps, which prevents loss and duplication.
"""

from __future__ import annotations

from dataclasses import replace

from pgcdc_assets.capture.cancellation import CancellationToken
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.report import CaptureReport
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.zone import RawZone

__all__ = ["CaptureLimits", "CaptureReport", "capture_window"]

NOT_ACKNOWLEDGED = "the server has not acknowledged the confirmed position yet"


def capture_window(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    window: LsnWindow,
    limits: CaptureLimits | None = None,
    token: CancellationToken | None = None,
) -> CaptureReport:
    """Land a window exactly once, and confirm its end to the slot.

    For arguments and errors see `CaptureSession` and `CaptureSession.land`.
    """
    with CaptureSession(settings, zone, slot, publication, limits, token) as session:
        report = session.land(window)
        if session.finish():
            return report
    return replace(report, warnings={**report.warnings, NOT_ACKNOWLEDGED: 1})
