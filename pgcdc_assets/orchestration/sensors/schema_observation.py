"""Events of the lag sensor about schema changes: a check, and an observation of the source asset.

Both are recorded when their content changes, so Dagster's log has an entry for each change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from pgcdc_assets.orchestration.checks.identities import (
    check_identities,
    recorded_failures,
    seen_without_identity,
)
from pgcdc_assets.orchestration.checks.raw import evaluation_of
from pgcdc_assets.orchestration.checks.schema_changes import (
    check_schema_changes,
    schema_change_metadata,
)
from pgcdc_assets.orchestration.metadata import source_column_schema
from pgcdc_assets.orchestration.sensors.lag_observation import Event, changed_evaluations
from pgcdc_assets.orchestration.state import read_gates
from pgcdc_assets.raw.relations.schema_events import SchemaChange, SchemaEvent
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable

# Changes after which updates and deletes may not identify their row.
_OF_IDENTITY = (SchemaChange.KEY_CHANGED, SchemaChange.IDENTITY_CHANGED)


def observe_schema_changes(
    instance: dg.DagsterInstance,
    zone: RawZone,
    capture: CdcCapture,
    snapshot: dg.AssetKey,
    sources: Mapping[CdcTable, dg.AssetKey],
    scds: Mapping[tuple[CdcTable, int], dg.AssetKey],
) -> list[Event]:
    """Return the events to record about tables with schema events.

    Args:
        snapshot: the snapshot asset, which has the check of replica identities.
        sources: the source tables' keys.
        scds: the SCD assets by table and kind.
    """
    events = zone.schema_events.read()
    if not events:
        return []
    gates = read_gates(zone, capture)
    own = {t: [e for e in events if e.table == t.name] for t in capture.tables}
    tables = {key: table for (table, _), key in scds.items() if own[table]}
    found = [
        evaluation_of(check_schema_changes(capture.name, key, own[table], gates.get(table.name)))
        for key, table in tables.items()
    ]
    changed = changed_evaluations(instance, found)
    recorded: list[Event] = list(changed)
    if any(event.change in _OF_IDENTITY for event in events):
        bad = seen_without_identity(zone, capture, recorded_failures(instance, snapshot))
        identities = check_identities(snapshot, bad, len(capture.tables))
        recorded += changed_evaluations(instance, [evaluation_of(identities)])
    for table in dict.fromkeys(tables[evaluation.asset_key] for evaluation in changed):
        metadata = {
            **schema_change_metadata(own[table], gates.get(table.name)),
            **_column_schema(zone, own[table][-1]),
        }
        recorded.append(dg.AssetObservation(sources[table], metadata=metadata))
    return recorded


def _column_schema(zone: RawZone, event: SchemaEvent) -> dict[str, Any]:
    """Describe the columns of the newest relation version of a table."""
    versions = [
        version
        for version in zone.relations.versions(event.epoch)
        if version.relation.relation_id == event.relation_id
    ]
    if not versions:
        return {}
    newest = max(versions, key=lambda version: (version.lsn, version.version))
    comments = zone.definitions.newest(event.epoch).comments(event.relation_id)
    return {"dagster/column_schema": source_column_schema(newest.relation, comments)}
