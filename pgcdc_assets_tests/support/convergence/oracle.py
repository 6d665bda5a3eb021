"""The expected rows of the raw zone, from a second slot without confirmations."""

from __future__ import annotations

from typing import Any

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.postgres.wire import peek_messages
from pgcdc_assets_tests.support.protocol import encoding, reference

_COMPARED = (
    "commit_lsn ordinal xid commit_ts origin op relation_id schema table old_kind old new unchanged"
).split()


def create_oracle(database: Database, slot: str) -> None:
    """Create the second slot, which contains all later commits."""
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))


def expected_changes(
    database: Database, slot: str, publication: str, start: Lsn, end: Lsn
) -> list[dict[str, Any]]:
    """Return the changes with start <= commit_lsn < end, by a SQL function and the slow decoder."""
    payloads = _peek(database, slot, publication)
    return [_compared(row) for row in reference.decode(payloads, start, end)]


def expected_messages(
    database: Database, slot: str, publication: str, start: Lsn, end: Lsn
) -> list[str]:
    """Return the contents of the non-transactional messages in a range of LSNs, in order."""
    return [
        message.content
        for message in reference.messages(_peek(database, slot, publication))
        if not message.is_transactional and start < message.lsn <= end
    ]


def _peek(database: Database, slot: str, publication: str) -> list[bytes]:
    with database.connect() as connection:
        return encoding.stream(peek_messages(connection, slot, publication))


def landed_changes(zone: RawZone) -> list[dict[str, Any]]:
    """Return all rows of the raw zone in stream order, with duplicates."""
    table = zone.changes.table.load()
    assert table is not None
    rows = (
        table.to_pyarrow_dataset()
        .to_table()
        .sort_by([("epoch", "ascending"), ("commit_lsn", "ascending"), ("ordinal", "ascending")])
    )
    return [_compared(row) for row in rows.to_pylist()]


def _compared(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _COMPARED}
