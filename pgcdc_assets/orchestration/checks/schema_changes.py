"""The check `schema_changes`: the recorded changes of a source table's definition.

The check warns while a change waits for a snapshot. The check reads only the lake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from pgcdc_assets.errors import resnapshot_command
from pgcdc_assets.raw.relations.schema_events import SchemaEvent
from pgcdc_assets.tables.schema_gate import SchemaGate, describe_event

SCHEMA_CHANGES = "schema_changes"

# The table shows the newest changes first; the lake has all changes.
_MAX_SHOWN = 50
_COLUMNS = ("lsn", "change", "columns", "detail", "needs_snapshot", "found_by", "recorded_at")


def check_schema_changes(
    capture: str, key: dg.AssetKey, events: Sequence[SchemaEvent], gate: SchemaGate | None
) -> dg.AssetCheckResult:
    """Report the schema changes of a table.

    Args:
        capture: the capture's name, for the remedy.
        key: the key of an SCD asset of the table.
        events: the schema events of the table, in stream order.
        gate: the open events; None without an open event.
    """
    newest = describe_event(events[-1]) if events else None
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=SCHEMA_CHANGES,
        passed=gate is None,
        severity=dg.AssetCheckSeverity.WARN,
        description=newest if gate is None else f"{gate.reason} {remedy_of(capture, gate)}",
        metadata=schema_change_metadata(events, gate),
    )


def remedy_of(capture: str, gate: SchemaGate) -> str:
    """Return the sentence that says how the wait for a snapshot ends."""
    if gate.heals:
        return "The lag sensor requests a re-snapshot."
    command = resnapshot_command(capture, str(gate.events[0].table))
    return f"The table stops here until a person takes a new snapshot: {command}"


def schema_change_metadata(
    events: Sequence[SchemaEvent], gate: SchemaGate | None
) -> dict[str, Any]:
    """Describe the schema changes of a table."""
    records = [
        dg.TableRecord(
            {
                "lsn": f"{event.epoch}:{event.lsn}",
                "change": event.change.value,
                "columns": ", ".join(event.columns),
                "detail": event.detail,
                "needs_snapshot": str(event.needs_snapshot).lower(),
                "found_by": event.found_by,
                "recorded_at": "" if event.recorded_at is None else event.recorded_at.isoformat(),
            }
        )
        for event in reversed(events[-_MAX_SHOWN:])
    ]
    schema = dg.TableSchema([dg.TableColumn(name) for name in _COLUMNS])
    return {
        "open_changes": "none" if gate is None else gate.reason,
        "change_count": len(events),
        "schema_changes": dg.MetadataValue.table(records, schema=schema),
    }
