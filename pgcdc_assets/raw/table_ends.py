"""The earliest LSN at which the raw zone proves that a table was replaced by another table.

Postgres logs nothing that logical decoding shows for DROP TABLE. The raw zone has two proofs that a
table was gone at an LSN, or at least had lost its name:

* A change of another relation has the declared name. If one transaction drops the table, creates
  the other table and inserts a row, the commit LSN of the change is exactly that of the drop.
* A look at the catalog did not find the table, or found another table under its name. The event of
  the look has the LSN of the WAL's end after the look.

The earliest proof counts. It is above every change of the table, and at or below the snapshot of
the other table, because a snapshot looks at the catalog first.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pyarrow.compute as pc

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.relations.schema_events import CATALOG, SchemaChange, SchemaEvent
from pgcdc_assets.raw.snapshots import Snapshot

if TYPE_CHECKING:
    from pgcdc_assets.raw.relations.source_relations import SourceRelations
    from pgcdc_assets.raw.zone import RawZone


class TableEnd(NamedTuple):
    """The position at which the rows of a table end, and its time by the source's clock."""

    lsn: Lsn
    at: dt.datetime


def find_table_end(
    zone: RawZone, relation_id: int, snapshot: Snapshot, relations: SourceRelations
) -> TableEnd | None:
    """Return the earliest proof that a table was gone; None without a proof.

    Args:
        relation_id: OID of the table.
        snapshot: of the table that has replaced it, in the same epoch.
        relations: of that epoch.
    """
    since = relations.snapshot_lsn(snapshot.name, relation_id, snapshot.snapshot_lsn)
    if since is None:
        return None
    ends = [
        TableEnd(event.lsn, event.seen_at or event.recorded_at)
        for event in zone.schema_events.read()
        if event.epoch == snapshot.epoch
        and since < event.lsn <= snapshot.snapshot_lsn
        and event.recorded_at is not None
        and _shows_end(event, snapshot, relation_id)
    ]
    changed = _first_change_of_another(zone, snapshot, relation_id, since)
    return min([*ends, *([] if changed is None else [changed])], default=None)


def find_table_ends(
    zone: RawZone, snapshots: Sequence[Snapshot], relations: SourceRelations
) -> Iterator[Lsn]:
    """Yield where the tables behind the snapshots of one declared table ended, in one epoch."""
    known = [(relations.snapshot_version(snapshot), snapshot) for snapshot in snapshots]
    found = [(v.relation.relation_id, snapshot) for v, snapshot in known if v is not None]
    for index, (relation_id, _) in enumerate(found):
        later = (snapshot for other, snapshot in found[index:] if other != relation_id)
        following = next(later, None)
        end = None
        if following is not None:
            end = find_table_end(zone, relation_id, following, relations)
        if end is not None:
            yield end.lsn


def _shows_end(event: SchemaEvent, snapshot: Snapshot, relation_id: int) -> bool:
    if event.found_by != CATALOG:
        return False
    if event.change is SchemaChange.TABLE_DROPPED:
        return event.relation_id == relation_id
    return (
        event.change is SchemaChange.TABLE_RECREATED
        and event.table == snapshot.name
        and event.relation_id != relation_id
    )


def _first_change_of_another(
    zone: RawZone, snapshot: Snapshot, relation_id: int, since: Lsn
) -> TableEnd | None:
    """Return the first change of another relation under the declared name before its snapshot."""
    first: TableEnd | None = None
    for batch in scan_changes(
        zone.changes.table,
        epoch=snapshot.epoch,
        start=since,
        end=snapshot.snapshot_lsn,
        names={snapshot.name},
        columns=("relation_id", "commit_lsn", "commit_ts"),
    ):
        others = batch.filter(pc.field("relation_id") != relation_id)
        if others.num_rows == 0:
            continue
        index = pc.index(others["commit_lsn"], pc.min(others["commit_lsn"])).as_py()
        found = TableEnd(
            Lsn(others["commit_lsn"][index].as_py()), others["commit_ts"][index].as_py()
        )
        first = found if first is None else min(first, found)
    return first
