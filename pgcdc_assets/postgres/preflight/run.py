"""The pre-flight: everything a capture needs of a server, looked at before anything is started.

Each finding names the exact thing and the SQL that mends it, so that a first run against a database
of one's own fails here, in one list, and not one error at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.preflight.finding import Finding, raise_errors
from pgcdc_assets.postgres.preflight.server import (
    check_replication,
    check_server,
    check_slot,
    read_server,
)
from pgcdc_assets.postgres.preflight.tables import check_tables
from pgcdc_assets.postgres.publication import read_publication
from pgcdc_assets.table_name import TableName

__all__ = ["Finding", "raise_errors", "run_preflight"]


def run_preflight(
    settings: ConnectionSettings,
    publication: str,
    slot: str,
    tables: Sequence[TableName] | None = None,
    keys: Mapping[TableName, Sequence[str]] | None = None,
    *,
    is_slot_ours: bool = True,
) -> list[Finding]:
    """Check server, role, publication, slot and tables.

    Args:
        tables: the tables to check; all of the publication by default.
        keys: the keys that the definitions declare, by table.
        is_slot_ours: the lake was filled from the slot, or takes it over whoever has read it.

    Raises:
        ConfigurationError: the connection string, user or password is wrong.
        ConnectionLost: the server is down.
    """
    with query_connection(settings, "check") as conn:
        server = read_server(conn)
        findings = [*check_server(server), *check_replication(settings, server)]
        try:
            published = read_publication(conn, publication, tables or ())
        except ConfigurationError as error:
            findings.append(Finding("publication", "error", str(error)))
        else:
            findings += check_tables(conn, published, tables, keys or {}, server.role)
        findings += check_slot(conn, server, slot, is_slot_ours)
    return findings
