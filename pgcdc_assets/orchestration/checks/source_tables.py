"""Whether the declared tables are still what their changes were captured from."""

from __future__ import annotations

from pgcdc_assets.errors import TableMoved
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.moved_tables import find_moved_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable


def read_table_places(
    settings: ConnectionSettings, zone: RawZone, capture: CdcCapture, purpose: str
) -> dict[CdcTable, TableMoved | None]:
    """Return for each captured table what became of it; None if it is where it was.

    A table that was never copied in this epoch is left out.

    Args:
        purpose: of the connection, for `pg_stat_activity`.
    """
    epoch = zone.epochs.latest()
    if epoch is None:
        return {}
    known = zone.relations.newest_ids(epoch.epoch, capture.table_names)
    with query_connection(settings, purpose) as conn:
        found = find_moved_tables(conn, capture.publication, known)
    moved = {error.relation: error.in_capture(capture.name) for error in found}
    return {table: moved.get(str(table.name)) for table in capture.tables if table.name in known}


def find_declared_moves(
    settings: ConnectionSettings, zone: RawZone, capture: CdcCapture, purpose: str
) -> list[TableMoved]:
    """Find the declared tables that are not where their changes came from."""
    places = read_table_places(settings, zone, capture, purpose)
    return [error for error in places.values() if error is not None]
