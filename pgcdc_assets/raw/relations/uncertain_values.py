"""Tables that the server rewrote, whose values the stream may lack.

`ALTER TYPE bigint` and `ALTER TYPE bigint USING a * 2` write the same rows of the catalog, and no
row event. An ALTER TABLE for a column that is not sent hides the traces of other changes. Only a
comparison with the source tells. The events in the lake name the tables that wait for a comparison,
so a killed process leaves nothing to repair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.relations.schema_events import SchemaChange, SchemaEvent, open_events
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.table_name import TableName


def find_uncertain_values(
    events: Sequence[SchemaEvent],
    snapshots: Iterable[Snapshot],
    keepers: Collection[TableName],
) -> dict[TableName, SchemaEvent]:
    """Return the newest event of each table that waits for a comparison.

    A table that waits for a snapshot needs no comparison.

    Args:
        keepers: tables that keep the rows of detached partitions.
    """
    copies = list(snapshots)
    uncertain = [e for e in events if e.change is SchemaChange.VALUES_UNCERTAIN]
    needed = {event.table: event for event in sorted(uncertain, key=lambda e: e.position)}
    waiting = open_events(events, copies, keepers=keepers)
    return {
        table: event
        for table, event in needed.items()
        if table not in waiting
        and not any(event.is_healed_by(copy) for copy in copies)
        and not any(
            e.change is SchemaChange.VALUES_CONFIRMED
            and e.table == table
            and e.position >= event.position
            for e in events
        )
    }


def conclude(event: SchemaEvent, lsn: Lsn, *, is_equal: bool) -> SchemaEvent:
    """Return the event of a comparison of the table at an LSN after the uncertain event."""
    if is_equal:
        return replace(
            event,
            lsn=lsn,
            change=SchemaChange.VALUES_CONFIRMED,
            detail="A comparison with the source found the same values.",
            recorded_at=None,
        )
    return replace(
        event,
        lsn=lsn,
        change=SchemaChange.TABLE_REWRITTEN,
        detail="The values differ from the source after ALTER TABLE wrote the table again.",
        needs_snapshot=True,
        recorded_at=None,
    )


def not_comparable(event: SchemaEvent) -> SchemaEvent:
    """Return the event of a table that cannot be compared with the source."""
    return replace(
        event,
        change=SchemaChange.TABLE_REWRITTEN,
        detail="ALTER TABLE wrote the table again, which cannot be compared with the source.",
        needs_snapshot=True,
        recorded_at=None,
    )
