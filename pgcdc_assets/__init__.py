"""Postgres change data capture as Dagster assets, merged by Spark into Delta Lake tables.

Each public name is imported at its first use, so reading the protocol or the raw zone does not
import Dagster.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgcdc_assets.lsn import Lsn, LsnWindow
    from pgcdc_assets.orchestration.automation import on_new_merges
    from pgcdc_assets.orchestration.build import build_cdc_definitions
    from pgcdc_assets.orchestration.component import PostgresCdcComponent
    from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
    from pgcdc_assets.orchestration.translator import PgcdcTranslator
    from pgcdc_assets.settings import CdcCapture, CdcTable
    from pgcdc_assets.settings.catalog import CatalogPolicy
    from pgcdc_assets.settings.policies import (
        CheckPolicy,
        HeartbeatPolicy,
        MessagePolicy,
        RetentionPolicy,
        SnapshotPolicy,
        StepLimit,
        StreamPolicy,
        WindowPolicy,
    )
    from pgcdc_assets.settings.selection import TableSelection

__version__ = "0.1.0"

__all__ = [
    "CatalogPolicy",
    "CdcCapture",
    "CdcTable",
    "CheckPolicy",
    "HeartbeatPolicy",
    "LakeResource",
    "Lsn",
    "LsnWindow",
    "MessagePolicy",
    "PgcdcTranslator",
    "PostgresCdcComponent",
    "PostgresResource",
    "RetentionPolicy",
    "SnapshotPolicy",
    "SparkResource",
    "StepLimit",
    "StreamPolicy",
    "TableSelection",
    "WindowPolicy",
    "__version__",
    "build_cdc_definitions",
    "on_new_merges",
]

_MODULES = {
    "CatalogPolicy": "pgcdc_assets.settings.catalog",
    "CdcCapture": "pgcdc_assets.settings",
    "CdcTable": "pgcdc_assets.settings",
    "CheckPolicy": "pgcdc_assets.settings.policies",
    "HeartbeatPolicy": "pgcdc_assets.settings.policies",
    "LakeResource": "pgcdc_assets.orchestration.resources",
    "Lsn": "pgcdc_assets.lsn",
    "LsnWindow": "pgcdc_assets.lsn",
    "MessagePolicy": "pgcdc_assets.settings.policies",
    "PgcdcTranslator": "pgcdc_assets.orchestration.translator",
    "PostgresCdcComponent": "pgcdc_assets.orchestration.component",
    "PostgresResource": "pgcdc_assets.orchestration.resources",
    "RetentionPolicy": "pgcdc_assets.settings.policies",
    "SparkResource": "pgcdc_assets.orchestration.resources",
    "StepLimit": "pgcdc_assets.settings.policies",
    "SnapshotPolicy": "pgcdc_assets.settings.policies",
    "StreamPolicy": "pgcdc_assets.settings.policies",
    "TableSelection": "pgcdc_assets.settings.selection",
    "WindowPolicy": "pgcdc_assets.settings.policies",
    "build_cdc_definitions": "pgcdc_assets.orchestration.build",
    "on_new_merges": "pgcdc_assets.orchestration.automation",
}

# Hidden from type checkers, which would otherwise accept any name.
if not TYPE_CHECKING:

    def __getattr__(name):
        try:
            module = _MODULES[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        return getattr(importlib.import_module(module), name)

    def __dir__():
        return sorted({*globals(), *__all__})
