"""The declared tables in the source's catalog: their names, and whether they are captured."""

from __future__ import annotations

from dataclasses import replace

from pgcdc_assets.errors import TableMoved
from pgcdc_assets.orchestration.state import left_tables
from pgcdc_assets.postgres.catalog.moved_tables import SourcePlace, read_source_places
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import FOLLOW
from pgcdc_assets.table_name import TableName


def read_relation_ids(zone: RawZone, capture: CdcCapture) -> dict[TableName, int]:
    """Return the OID of each captured table with a snapshot in this epoch, by declared name.

    With the setting `on_schema_change: follow`, the OID is the one that the next snapshot reads.
    With another setting, the OID is the one in the newest snapshot.
    """
    epoch = zone.epochs.latest()
    if epoch is None:
        return {}
    relations = zone.source_relations(epoch.epoch)
    following = [table.name for table in capture.tables if table.schema_policy == FOLLOW]
    return {
        **relations.newest_ids(capture.table_names),
        **relations.followed_ids(following, zone.schema_events.read()),
    }


def read_table_places(
    settings: ConnectionSettings, zone: RawZone, capture: CdcCapture, purpose: str
) -> dict[CdcTable, SourcePlace]:
    """Return the place of each captured table in the source's catalog.

    Tables without a snapshot in this epoch are omitted. If another table of the publication has the
    declared name, and the setting `on_schema_change` is `follow`, the place has no error: the lag
    sensor requests a snapshot of the other table.

    Args:
        purpose: the purpose of the connection, which `pg_stat_activity` shows.
    """
    known = read_relation_ids(zone, capture)
    if not known:
        return {}
    with query_connection(settings, purpose) as conn:
        places = read_source_places(conn, capture.publication, known)
    found = {}
    for table in capture.tables:
        place = places.get(table.name)
        if place is not None:
            is_healed = place.is_replaced and table.schema_policy == FOLLOW
            error = None if is_healed else place.error and place.error.in_capture(capture.name)
            found[table] = replace(place, error=error)
    return found


def find_declared_moves(
    settings: ConnectionSettings, zone: RawZone, capture: CdcCapture, purpose: str
) -> list[TableMoved]:
    """Find the declared tables whose changes are no longer captured.

    If the capture follows its publication, a table that leaves the publication is not an error.
    """
    places = read_table_places(settings, zone, capture, purpose)
    left = left_tables(zone, capture)
    return [
        place.error
        for table, place in places.items()
        if place.error is not None and table.name not in left
    ]
