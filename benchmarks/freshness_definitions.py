"""The code location of the freshness benchmark: one table, with default settings."""

from benchmarks.freshness_source import NAME, PUBLICATION, TABLE
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions

defs = build_cdc_definitions(CdcCapture(NAME, PUBLICATION, (CdcTable("public", TABLE),)))
