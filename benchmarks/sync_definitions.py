"""The code location of the sync benchmark: two tables, with a capture per repetition."""

import dagster as dg

from benchmarks import workload
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions

REPETITIONS = 3
NAMES = [f"sync_{number}" for number in range(1, REPETITIONS + 1)]

_TABLES = (CdcTable("public", "customers"), CdcTable("public", "orders"))

defs = dg.Definitions.merge(
    *(build_cdc_definitions(CdcCapture(name, workload.PUBLICATION, _TABLES)) for name in NAMES)
)
