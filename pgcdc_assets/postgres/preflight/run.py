"""The pre-flight check of all that a capture requires of a server.

Each finding names the object and the SQL that corrects the problem. A first run against a new
database therefore reports all problems in one list, instead of one error per run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.catalog.publication import read_publication
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.preflight.encryption import examine_encryption
from pgcdc_assets.postgres.preflight.finding import Finding, raise_errors
from pgcdc_assets.postgres.preflight.server import (
    examine_replication,
    examine_server,
    examine_slot,
    read_server,
)
from pgcdc_assets.postgres.preflight.tables import examine_tables
from pgcdc_assets.postgres.preflight.two_phase import examine_prepared_transactions
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
    is_slot_known: bool = False,
    two_phase: bool = False,
    relation_ids: Mapping[TableName, int] | None = None,
    may_be_empty: bool = False,
) -> list[Finding]:
    """Return the findings about server, role, publication, slot and tables.

    Args:
        settings: the source database.
        publication: the publication's name.
        slot: the slot's name.
        tables: (schema, table) of the tables to check; None: all tables of the publication.
        keys: columns of the declared keys, by (schema, table).
        is_slot_ours: the lake was filled from the slot, or `--adopt-slot` was given.
        is_slot_known: the lake was filled from the slot.
        two_phase: `stream.two_phase`.
        relation_ids: OIDs of captured tables by declared name, for tables that were renamed since.
        may_be_empty: the tables of the publication are followed, so tables may be added later.

    Raises:
        ConfigurationError: the connection string, user or password is wrong.
        ConnectionLost: the server is down.
    """
    with query_connection(settings, "check") as conn:
        server = read_server(conn)
        findings = [
            *examine_server(server),
            *examine_encryption(conn, settings),
            *examine_replication(settings, server),
        ]
        try:
            published = read_publication(conn, publication, tables or (), settings.renewal)
        except ConfigurationError as error:
            findings.append(Finding("publication", "error", str(error)))
        else:
            findings += examine_tables(
                conn,
                published,
                tables,
                keys or {},
                server.role,
                relation_ids or {},
                may_be_empty=may_be_empty,
            )
        findings += examine_slot(conn, server, slot, is_slot_ours, settings.name)
        findings += examine_prepared_transactions(
            conn, slot, server.version, two_phase=two_phase, is_known=is_slot_known
        )
    return findings
