"""One capture as a separate process, whose CPU and memory are measured."""

from __future__ import annotations

import json
import sys

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.meter import Phase
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone

if __name__ == "__main__":
    conninfo, lake, slot, publication, window, streaming = sys.argv[1:]
    report = capture_window(
        ConnectionSettings(conninfo=conninfo, name="bench"),
        RawZone(Lake(lake), "bench"),
        slot,
        publication,
        LsnWindow.parse(window),
        CaptureLimits(stream=StreamSettings(plugin=PluginOptions(Streaming(streaming)))),
    )
    said = {
        "row_count": report.row_count,
        "seconds": report.seconds,
        "waiting_seconds": report.phase_seconds[Phase.WAITING],
    }
    print(json.dumps(said))
