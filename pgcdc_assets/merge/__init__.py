"""From the raw zone to slowly changing dimension tables, by Spark.

`merge_tables` and `rebuild_table` are imported when they are first used: a caller that needs a
report's type alone does not load PySpark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pgcdc_assets.merge.report import MergeFailure, MergeReport

if TYPE_CHECKING:
    from pgcdc_assets.merge.rebuild import RebuildReport, rebuild_table
    from pgcdc_assets.merge.run import merge_tables

__all__ = [
    "MergeFailure",
    "MergeReport",
    "RebuildReport",
    "merge_tables",
    "rebuild_table",
]

_MODULES = {
    "RebuildReport": "pgcdc_assets.merge.rebuild",
    "merge_tables": "pgcdc_assets.merge.run",
    "rebuild_table": "pgcdc_assets.merge.rebuild",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
