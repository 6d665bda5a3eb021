"""Comparisons of the source with SCD1, and invariants of SCD tables.

`compare_at` and `compare_tables` compare at one LSN by digests, also while writers commit.
`compare_table` compares the current rows of idle tables by value, for tests and demonstrations.
`check_merged` checks the rows that a merge changed in SCD tables, and `check_all` checks all rows.
"""

from pgcdc_assets.verify.change_logs import find_change_logs, is_change_log, is_comparable
from pgcdc_assets.verify.compare_digests import compare_at, compare_tables
from pgcdc_assets.verify.compare_rows import compare_table, key_columns
from pgcdc_assets.verify.comparison_point import Moment, source_moment, wait_captured
from pgcdc_assets.verify.findings import Findings, Rule
from pgcdc_assets.verify.invariants import check_all, check_merged
from pgcdc_assets.verify.report import Comparison, ComparisonFailure, Difference, DifferenceKind
from pgcdc_assets.verify.rewritten_tables import read_uncertain_values, record_comparison

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
    "find_change_logs",
    "is_change_log",
    "is_comparable",
    "key_columns",
    "read_uncertain_values",
    "record_comparison",
    "source_moment",
    "wait_captured",
]
