"""Postgres change data capture as Dagster assets, merged by Spark into Delta Lake tables.

The names below are imported when they are first used: reading the protocol or the raw zone does not
need Dagster.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "CdcCapture": "pgcdc_assets.orchestration.settings",
    "CdcTable": "pgcdc_assets.orchestration.settings",
    "LakeResource": "pgcdc_assets.orchestration.resources",
    "Lsn": "pgcdc_assets.lsn",
    "LsnWindow": "pgcdc_assets.lsn",
    "PgcdcTranslator": "pgcdc_assets.orchestration.translator",
    "PostgresCdcComponent": "pgcdc_assets.orchestration.component",
    "PostgresResource": "pgcdc_assets.orchestration.resources",
    "SparkResource": "pgcdc_assets.orchestration.resources",
    "WindowPolicy": "pgcdc_assets.orchestration.settings",
    "build_cdc_definitions": "pgcdc_assets.orchestration.build",
    "on_new_merges": "pgcdc_assets.orchestration.automation",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    try:
        module = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
