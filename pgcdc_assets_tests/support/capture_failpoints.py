"""The failpoints of the capture of a window, in the order of a run."""

from __future__ import annotations

from pgcdc_assets import failpoints

TWO_PHASE_LANDING = (
    failpoints.BEFORE_DELTA_COMMIT,
    failpoints.AFTER_RELATIONS_COMMIT,
    failpoints.AFTER_PREPARED_COMMIT,
    failpoints.AFTER_DELTA_COMMIT,
    failpoints.AFTER_STATUS_PACKET,
)
LANDING = tuple(name for name in TWO_PHASE_LANDING if name != failpoints.AFTER_PREPARED_COMMIT)

WINDOW = (failpoints.MID_STREAM, *LANDING)
TWO_PHASE_WINDOW = (failpoints.MID_STREAM, *TWO_PHASE_LANDING)

# Early and late in a long stream.
MID_STREAM = (f"{failpoints.MID_STREAM}:1", f"{failpoints.MID_STREAM}:4")
