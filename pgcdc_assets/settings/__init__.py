"""The settings of a capture as plain values, from YAML or Python.

Nothing here opens a connection or a file, so definitions load without a network.
"""

from pgcdc_assets.settings.capture import (
    LONGEST_SLOT,
    CdcCapture,
    check_capture_name,
    check_slot_name,
)
from pgcdc_assets.settings.table import CdcTable

__all__ = ["LONGEST_SLOT", "CdcCapture", "CdcTable", "check_capture_name", "check_slot_name"]
