"""The code location of the benchmark of a run: one table, and runs that end after their windows."""

from benchmarks.freshness_source import NAME, PUBLICATION, TABLE
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions
from pgcdc_assets.settings.policies import WindowPolicy

CAPTURE = CdcCapture(
    NAME, PUBLICATION, (CdcTable("public", TABLE),), windows=WindowPolicy(run_seconds=0)
)
defs = build_cdc_definitions(CAPTURE)
