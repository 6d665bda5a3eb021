"""Whether the declared tables are still what their changes were captured from."""

from __future__ import annotations

from pgcdc_assets.errors import TableMoved
from pgcdc_assets.orchestration.settings import CdcCapture
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.moved_tables import find_moved_tables
from pgcdc_assets.raw.zone import RawZone


def find_moved(
    settings: ConnectionSettings, zone: RawZone, capture: CdcCapture, purpose: str
) -> list[TableMoved]:
    """Find the declared tables that are not where their changes came from.

    Args:
        purpose: of the connection, for `pg_stat_activity`.
    """
    epoch = zone.epochs.latest()
    if epoch is None:
        return []
    known = zone.relations.newest_ids(epoch.epoch, capture.table_names)
    with query_connection(settings, purpose) as conn:
        return find_moved_tables(conn, capture.publication, known)
