"""One capture in a process of its own, so that its CPU and its memory are nobody else's."""

from __future__ import annotations

import json
import resource
import sys
import time

from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone

if __name__ == "__main__":
    conninfo, lake, slot, publication, window = sys.argv[1:]
    cpu_before = time.process_time()
    report = capture_window(
        ConnectionSettings(conninfo=conninfo, name="bench"),
        RawZone(Lake(lake), "bench"),
        slot,
        publication,
        LsnWindow.parse(window),
    )
    measured = {
        "row_count": report.row_count,
        "seconds": report.seconds,
        "capture_cpu_seconds": time.process_time() - cpu_before,
        # Imports included: what the process costs in all.
        "process_cpu_seconds": time.process_time(),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "megabytes_received": report.bytes_received / 1e6,
    }
    print(json.dumps(measured))
