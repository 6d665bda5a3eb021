"""Source against SCD1.

`compare_at` compares both at one LSN, while writers go on, and only digests leave the servers;
`compare_table` compares what is there now, value by value, for tests and demonstrations at rest.
"""

from pgcdc_assets.verify.by_value import compare_table, count_duplicate_keys, key_columns
from pgcdc_assets.verify.comparing import compare_at
from pgcdc_assets.verify.moment import Moment, source_moment, wait_captured
from pgcdc_assets.verify.report import Comparison, Difference, Kind

__all__ = [
    "Comparison",
    "Difference",
    "Kind",
    "Moment",
    "compare_at",
    "compare_table",
    "count_duplicate_keys",
    "key_columns",
    "source_moment",
    "wait_captured",
]
