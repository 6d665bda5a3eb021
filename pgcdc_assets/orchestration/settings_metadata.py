"""A capture's settings as metadata of its raw asset, for tools that load a code location."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import dagster as dg

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

CAPTURE_METADATA = "pgcdc/capture"


def write_capture_settings(capture: CdcCapture) -> dg.JsonMetadataValue:
    """Write the settings."""
    return dg.MetadataValue.json(_lists(asdict(capture)))


def read_capture_settings(metadata: Any) -> CdcCapture:
    """Read the settings."""
    data = dict(metadata.data)
    tables = tuple(CdcTable.of_fields(table) for table in data["tables"])
    own = data.get("own_settings")
    selection = data.get("selection")
    if selection is not None:
        lists = {name: tuple(selection[name]) for name in ("include", "exclude", "scd")}
        selection = TableSelection(**{**selection, **lists})
    return CdcCapture(
        **{
            **data,
            "tables": tables,
            "selection": selection,
            "own_settings": None if own is None else tuple(map(CdcTable.of_fields, own)),
            "windows": WindowPolicy(**data["windows"]),
            "stream": StreamPolicy(**data["stream"]),
            "heartbeat": _optional(HeartbeatPolicy, data.get("heartbeat")),
            "catalog": _optional(CatalogPolicy, data.get("catalog")),
            "messages": _optional(MessagePolicy, data.get("messages")),
            "snapshot": SnapshotPolicy(**data.get("snapshot", {})),
            "retention": RetentionPolicy(**data["retention"]),
            "checks": CheckPolicy(**data.get("checks", {})),
            "merge_step": StepLimit(**data.get("merge_step", {})),
        }
    )


def _optional(policy: Callable[..., Any], data: Mapping[str, Any] | None) -> Any:
    return None if data is None else policy(**data)


def _lists(value: Any) -> Any:
    """Convert tuples to lists, because JSON has no tuples."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    return value
