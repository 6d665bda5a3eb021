"""The exported snapshot of a copy: that of a new slot, or a later one."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure
from pgcdc_assets.errors import TransientError
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.copy.reader import hold_snapshot
from pgcdc_assets.postgres.open_writers import wait_for_writers
from pgcdc_assets.postgres.slots.creation import SlotOptions
from pgcdc_assets.postgres.slots.status import ExportedSnapshot, create_slot
from pgcdc_assets.postgres.snapshots.plain import export_plain_snapshot
from pgcdc_assets.postgres.snapshots.standby import export_standby_snapshot
from pgcdc_assets.raw.relations.schema_events import open_events
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName


@contextlib.contextmanager
def export_by_new_slot(
    settings: ConnectionSettings, slot: str, options: SlotOptions
) -> Iterator[ExportedSnapshot]:
    """Export a snapshot by a new slot. The snapshot outlives the replication connection.

    A temporary slot is dropped as soon as another session holds the snapshot.
    """
    with contextlib.ExitStack() as stack:
        with create_slot(settings, slot, options=options) as made:
            name = stack.enter_context(hold_snapshot(settings, made.snapshot_name))
        yield replace(made, snapshot_name=name)


def relation_ids(wanted: Sequence[PublishedTable | SnapshotFailure]) -> set[int]:
    """Return the OIDs of the tables."""
    return {each.relation.relation_id for each in wanted if isinstance(each, PublishedTable)}


def export_later(
    settings: ConnectionSettings,
    slot: str,
    wanted: Sequence[PublishedTable | SnapshotFailure],
    read_again: Callable[[], list[PublishedTable | SnapshotFailure]],
    open_snapshot: contextlib.ExitStack,
    standby: ConnectionSettings | None = None,
) -> tuple[ExportedSnapshot, list[PublishedTable | SnapshotFailure]]:
    """Export a snapshot, without a slot if its LSN can be proved, and read the tables again.

    A column that was added before the snapshot is in the snapshot. The copy checks that the tables
    were not altered after the snapshot.

    Args:
        standby: the standby that exports the snapshot; None: the source database exports it.
    """
    if standby is not None:
        snapshot = open_snapshot.enter_context(export_standby_snapshot(settings, standby))
        return snapshot, read_again()
    with contextlib.ExitStack() as held:
        plain = held.enter_context(export_plain_snapshot(settings, relation_ids(wanted)))
        if plain is not None:
            found = read_again()
            if plain.is_exact_for(relation_ids(found)):
                open_snapshot.push(held.pop_all())
                return plain, found
    marker = f"{slot[:45]}_copy_{uuid.uuid4().hex[:8]}"
    snapshot = open_snapshot.enter_context(
        export_by_new_slot(settings, marker, SlotOptions(temporary=True))
    )
    return snapshot, read_again()


def export_settled(
    settings: ConnectionSettings,
    zone: RawZone,
    epoch: int,
    slot: str,
    read_again: Callable[[], list[PublishedTable | SnapshotFailure]],
    open_snapshot: contextlib.ExitStack,
    standby: ConnectionSettings | None = None,
) -> tuple[ExportedSnapshot | None, list[PublishedTable | SnapshotFailure]]:
    """Export a snapshot after the writers that the stream may not send, and read the tables.

    A table whose writers do not end in time is a failure. Without a table to copy there is no
    snapshot.
    """
    found = read_again()
    blocked = _wait_for_unsent_writers(settings, zone, epoch, found)
    free = [blocked.get(_name(each), each) for each in found]
    if not relation_ids(free):
        return None, free
    known = {_name(each) for each in found}

    def read_free() -> list[PublishedTable | SnapshotFailure]:
        # A slot waits for the writers of a table that has joined since. Of a standby, the table is
        # left to the next run.
        again = (each for each in read_again() if standby is None or _name(each) in known)
        return [blocked.get(_name(each), each) for each in again]

    return export_later(settings, slot, free, read_free, open_snapshot, standby)


def _wait_for_unsent_writers(
    settings: ConnectionSettings,
    zone: RawZone,
    epoch: int,
    found: Sequence[PublishedTable | SnapshotFailure],
) -> dict[TableName, SnapshotFailure]:
    """Wait for the open writers of the tables that were altered, or joined, since their snapshot.

    The stream sends what such a writer has written before as the catalog was then: not at all, if
    the publication did not have the table, or with the former label of an enum value.
    """
    snapshots = zone.snapshots.complete_snapshots(epoch)
    copied = {(snapshot.name, snapshot.relation_id) for snapshot in snapshots}
    altered = open_events(zone.schema_events.read(), snapshots)
    unsettled = {
        each.relation.relation_id: each.declared_name
        for each in found
        if isinstance(each, PublishedTable)
        and (
            (each.declared_name, each.relation.relation_id) not in copied
            or each.declared_name in altered
        )
    }
    return {
        (name := unsettled[oid]): SnapshotFailure(
            *name,
            TransientError(
                reason=f"Table {name}: {writer.describe()} has written to the table. The stream "
                "may lack these rows, because the table was added to the publication, or altered, "
                f"after them. Wait for its end, or {writer.remedy()}. Then run it again."
            ),
        )
        for oid, writer in wait_for_writers(settings, unsettled).items()
    }


def _name(each: PublishedTable | SnapshotFailure) -> TableName:
    return each.declared_name if isinstance(each, PublishedTable) else each.name
