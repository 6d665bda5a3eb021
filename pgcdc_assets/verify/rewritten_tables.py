"""The results of comparisons with the source for tables that were rewritten for a wider type."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pgcdc_assets.raw.relations.schema_events import SchemaChange, SchemaEvent
from pgcdc_assets.raw.relations.uncertain_values import conclude, find_uncertain_values
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify.report import Comparison


def read_uncertain_values(
    zone: RawZone, keepers: Collection[TableName]
) -> dict[TableName, SchemaEvent]:
    """Return the tables whose values USING may have changed, each with its event.

    Args:
        keepers: tables that keep the rows of detached partitions.
    """
    events = zone.schema_events.read()
    if not events:
        return {}
    return find_uncertain_values(events, zone.snapshots.complete_snapshots(), keepers)


def record_comparison(
    zone: RawZone, uncertain: Mapping[TableName, SchemaEvent], found: Comparison
) -> list[SchemaEvent]:
    """Record what a comparison says about a table's uncertain values, and return the new event.

    A table that differs then waits for a snapshot, as after any change that cannot be replayed.

    Raises:
        TransientError: the lake cannot be written.
    """
    event = uncertain.get(TableName(found.schema, found.table))
    if event is None or found.lsn is None or found.lsn < event.lsn:
        return []
    columns = {
        name
        for each in zone.schema_events.read()
        if each.table == event.table and each.change is SchemaChange.VALUES_UNCERTAIN
        for name in each.columns
    }
    is_equal = found.has_equal_values(columns)
    return zone.schema_events.record([conclude(event, found.lsn, is_equal=is_equal)])
