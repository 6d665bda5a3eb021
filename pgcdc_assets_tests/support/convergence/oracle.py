"""What the raw zone must hold, told by a second slot that nobody confirms or kills."""

from __future__ import annotations

from typing import Any

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.protocol import reference

# A pgoutput message in a CopyData message stands behind this header (w, three 64-bit numbers).
_HEADER = b"w" + bytes(24)

_COMPARED = (
    "commit_lsn ordinal xid commit_ts origin op relation_id schema table old_kind old new unchanged"
).split()


def create_oracle(database: Database, slot: str) -> None:
    """Make the second slot; everything committed from now on will be told."""
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))


def expected_changes(
    database: Database, slot: str, publication: str, start: Lsn, end: Lsn
) -> list[dict[str, Any]]:
    """Every change with start <= commit_lsn < end, by a SQL function and a slow decoder."""
    messages = database.query(
        "select data from pg_logical_slot_peek_binary_changes(%s, null, null, "
        "'proto_version', '1', 'publication_names', %s, 'messages', 'true')",
        (slot, publication),
    )
    payloads = [_HEADER + bytes(data) for (data,) in messages]
    return [_compared(row) for row in reference.decode(payloads, start, end)]


def landed_changes(zone: RawZone) -> list[dict[str, Any]]:
    """Every row of the raw zone in stream order, repeats included."""
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
