"""The code location of the freshness benchmark: tables with default settings, but shorter runs."""

import os

from benchmarks.freshness_source import NAME, PUBLICATION, TABLES, table_names
from pgcdc_assets import CdcCapture, CdcTable, WindowPolicy, build_cdc_definitions

# Shorter than the measurement.
RUN_SECONDS = 240.0

defs = build_cdc_definitions(
    CdcCapture(
        NAME,
        PUBLICATION,
        tuple(CdcTable("public", name) for name in table_names(int(os.environ[TABLES]))),
        windows=WindowPolicy(run_seconds=RUN_SECONDS),
    )
)
