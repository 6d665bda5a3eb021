"""Source against SCD1, and what must hold in the SCD tables themselves.

`compare_at` and `compare_tables` compare both at one LSN, while writers go on, by digests;
`compare_table` compares what is there now, value by value, for tests and demonstrations at rest.
`check_merged` and `check_all` look at SCD tables alone: at what a merge touched, and at all rows.
"""

from pgcdc_assets.verify.compare_digests import compare_at, compare_tables
from pgcdc_assets.verify.compare_rows import compare_table, key_columns
from pgcdc_assets.verify.comparison_point import Moment, source_moment, wait_captured
from pgcdc_assets.verify.findings import Findings, Rule
from pgcdc_assets.verify.invariants import check_all, check_merged
from pgcdc_assets.verify.report import Comparison, ComparisonFailure, Difference, DifferenceKind

__all__ = [
    "Comparison",
    "ComparisonFailure",
    "Difference",
    "DifferenceKind",
    "Findings",
    "Moment",
    "Rule",
    "check_all",
    "check_merged",
    "compare_at",
    "compare_table",
    "compare_tables",
    "key_columns",
    "source_moment",
    "wait_captured",
]
