"""Captures with two_phase, and what they leave in the lake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings

if TYPE_CHECKING:
    from pgcdc_assets.capture.window import CaptureReport
    from pgcdc_assets.lsn import LsnWindow
    from pgcdc_assets_tests.support.captures import Capturing


def two_phase_limits(streaming: Streaming = Streaming.OFF) -> CaptureLimits:
    """Return limits with two_phase."""
    return CaptureLimits(stream=StreamSettings(plugin=PluginOptions(streaming, True)))


def capture(
    capturing: Capturing,
    window: LsnWindow | None = None,
    streaming: Streaming = Streaming.OFF,
) -> CaptureReport:
    """Capture the next window by a session of its own, with two_phase."""
    return capturing.capture(window, two_phase_limits(streaming))


def stored_gids(capturing: Capturing) -> list[str]:
    """Return the gids of the stored transactions that have not ended, in order of PREPARE."""
    stored = capturing.zone.prepared.unfinished(1, capturing.captured_through())
    return [each.key.gid for each in sorted(stored, key=lambda each: each.key.lsn)]


def stored_row_count(capturing: Capturing) -> int:
    """Return the number of rows of raw/prepared, of ended transactions as well."""
    table = capturing.zone.prepared.table.load()
    return 0 if table is None else int(table.to_pyarrow_table().num_rows)
