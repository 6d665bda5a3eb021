"""The code location of the freshness benchmark: tables with default settings."""

import os

from benchmarks.freshness_source import NAME, PUBLICATION, TABLES, table_names
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions

defs = build_cdc_definitions(
    CdcCapture(
        NAME,
        PUBLICATION,
        tuple(CdcTable("public", name) for name in table_names(int(os.environ[TABLES]))),
    )
)
