"""From the raw zone to slowly changing dimension tables, by Spark.

`merge_tables` is fetched on first use: whoever only wants a watermark or a report's type does not
load PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgcdc_assets.merge.report import MergeFailure, MergeReport

if TYPE_CHECKING:
    from pgcdc_assets.merge.run import merge_tables

__all__ = ["MergeFailure", "MergeReport", "merge_tables"]


def __getattr__(name: str) -> Any:
    if name == "merge_tables":
        from pgcdc_assets.merge.run import merge_tables

        return merge_tables
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
